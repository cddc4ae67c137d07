"""A worker that reads a stream: steps carry the positions, repeated ones are flushed, other modes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.ps.worker.stream_progress import Resumption, StreamProgress
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.served import batches, run_job


def reading(own: Fleet, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> fleet.StreamDataset:
    monkeypatch.setattr("fleet.dataset.stream.running_session", lambda: own.session)
    events = batches(9)
    return fleet.StreamDataset(
        lambda partition, start: ((offset, events[offset]) for offset in range(start, 9)),
        lambda event: event,
        batch_size=1,
        collate=lambda samples: samples[0],
        name="events",
        **settings,
    )


def step(model: Any, optimizer: Any, batch: Any) -> None:
    ads, words, target = batch
    torch.nn.functional.mse_loss(model(ads, words), target).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["sync", "async", "half_async"])
def test_the_servers_know_the_events_of_each_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet.StrategyFactory.create_half_async_strategy() if mode == "half_async" else strategy(mode)

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, made, make_sgd)
        stream = iter(reading(own, monkeypatch))
        for _ in range(4):
            step(model, optimizer, next(stream))
        trainer = own.session.server_job.trainer
        trainer.connection.flush()
        other = trainer.connection.connect(9)
        found = [welcome["points"]["-1"][1] for welcome in other.welcomes()]
        other.close()
        own.stop_worker()
        return found

    (found,) = run_job(work, num_servers=2, strategy=made)
    assert found == [{"events": {"0": 4}}] * 2


def test_steps_that_some_servers_have_are_numbered_as_they_were() -> None:
    made = strategy("async")

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, made, make_sgd)
        trainer = own.session.server_job.trainer
        numbers = []
        trainer.connection.streams = StreamProgress(Resumption(again=((3, {}), (5, {}))), step=9)
        trainer.connection.client.step = 2
        for batch in batches(4):
            step(model, optimizer, batch)
            numbers.append(trainer.connection.client.step)
        own.stop_worker()
        return numbers

    assert run_job(work, strategy=made) == [[4, 9, 10, 11]]


@pytest.mark.parametrize("mode", ["geo", "hybrid"])
def test_modes_that_train_here_are_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = strategy("async")
    if mode == "geo":
        made.a_sync_configs = {"k_steps": 2}
    else:
        made.hybrid_configs = {"dp_degree": 1}

    def work(own: Fleet, rank: int) -> Any:
        served(own, made, make_sgd)
        with pytest.raises(
            UnsupportedOptionError, match="in geo and hybrid jobs a worker trains parameters of its own"
        ):
            next(iter(reading(own, monkeypatch)))
        own.stop_worker()

    run_job(work, strategy=made)


def test_prefetch_needs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = strategy("async")

    def work(own: Fleet, rank: int) -> Any:
        model, _ = served(own, made, make_sgd)
        ads, _, _ = next(iter(reading(own, monkeypatch)))
        with pytest.raises(ConfigError, match=r"stream 'events'.*ahead=1"):
            model.module.ads.prefetch(ads)
        own.stop_worker()

    run_job(work, strategy=made)
