"""fleet.load_model of a save that is damaged, or that a server fails to load: what the workers go on with (D.8)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import CheckpointError, PSError
from fleet.facade import Fleet
from fleet.ps.client.client import NothingLoaded
from fleet.ps.server import server_files
from tests.fleet.ps_job.test_server_job import make_adagrad, make_sgd, rows_of, served, strategy
from tests.helpers.served import batches, run_job, strategy_of, train


def damage(folder: Path, table: str, server: int = 0) -> None:
    path = next((folder / table).glob(f"part-{server:03d}-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Returns what the next forward sees, and what the servers hold."""
    with torch.no_grad():
        words = model.module.words(torch.arange(20))
    seen = {"ads": rows_of(model), "words": words, "out": model.module.out.weight}
    return {name: value.detach().clone() for name, value in {**seen, **model.state_dict()}.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train_and_load(own: Fleet, rank: int, folder: Path, spoiled: tuple[str, int] | None) -> Any:
    """Returns the text of the refusal, and the values at each moment; ``spoiled`` are a table and a server."""
    model, optimizer = served(own, strategy("sync"), make_adagrad, seed=rank)
    data = batches(8, rank, 2)
    text = ""
    train(model, optimizer, data[:2])
    own.save_persistables(folder)
    own.save_persistables(folder / "whole")
    train(model, optimizer, data[2:4])
    before = values_of(model)
    if spoiled is not None:
        if rank == 0:
            damage(folder, *spoiled)
        own.barrier_worker()
        with pytest.raises(
            PSError, match=rf"server {spoiled[1]} .*{folder}/{spoiled[0]}/part.*Nothing was loaded\.$"
        ) as caught:
            own.load_model(folder)
        assert isinstance(caught.value, NothingLoaded)
        text = str(caught.value)
    assert same(values_of(model), before)
    train(model, optimizer, data[4:6])
    after = values_of(model)
    own.load_model(folder / "whole")
    loaded = values_of(model)
    train(model, optimizer, data[6:])
    own.save_persistables(folder / "last")
    last = values_of(model)
    own.stop_worker()
    return text, (before, after, loaded, last)


@pytest.mark.parametrize(("table", "server"), [("words", 1), ("ads", 0)])
def test_a_refused_load_is_as_if_it_had_not_been_called(table: str, server: int, tmp_path: Path) -> None:
    """Two servers, two workers: both are told the same, go on as without it, and save and load afterwards."""
    plain, other = (
        run_job(
            partial(train_and_load, folder=tmp_path / f"{bool(spoiled)}", spoiled=spoiled),
            num_servers=2,
            num_workers=2,
            strategy=strategy("sync"),
        )
        for spoiled in (None, (table, server))
    )
    assert other[0][0] == other[1][0] != ""
    for rank in range(2):
        assert all(same(one, two) for one, two in zip(plain[rank][1], other[rank][1], strict=True))


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_a_save_of_another_model_of_as_many_parameters_is_refused(mode: str, tmp_path: Path) -> None:
    """Two groups of the optimizer: the second is of other shapes. The server refuses it at its start, too."""

    def model_of(own: Fleet, width: int) -> Any:
        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(24 // width, width, bias=False))
        groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}]
        optimizer = own.distributed_optimizer(torch.optim.SGD(groups, 0.1), strategy_of(mode))
        return own.distributed_model(net), optimizer

    def work(own: Fleet, rank: int, width: int) -> Any:
        model, _ = model_of(own, width)
        own.init_worker()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        text = ""
        try:
            own.load_model(tmp_path) if width == 4 else own.save_persistables(tmp_path)
        except NothingLoaded as error:
            text = str(error)
        assert same(before, model.state_dict())
        own.stop_worker()
        return text

    run_job(partial(work, width=6), num_servers=2, num_workers=2, strategy=strategy_of(mode))
    texts = run_job(partial(work, width=4), num_servers=2, num_workers=2, strategy=strategy_of(mode))
    assert texts[0] == texts[1]
    rule = r"of 'dense.1', parameter 0 \('1.weight'\) is \[6, 4\] there and \[4, 6\] here\."
    assert re.search(rf"server 0 .*dense\.1/part-000.json.*{rule}.*Nothing was loaded\.$", texts[0])

    def serve(own: Fleet, index: int) -> None:
        model_of(own, 4)
        own.init_server(tmp_path)
        own.run_server()

    with pytest.raises(CheckpointError, match=r"\('1.weight'\) is \[6, 4\] there"):
        run_job(lambda own, rank: None, serve=serve, strategy=strategy_of(mode))


def load_in_vain(own: Fleet, rank: int, mode: str, folder: Path) -> Any:
    """Returns the text of the error, and the values after it and after a load that goes well."""
    model, optimizer = served(own, strategy_of(mode), make_sgd, seed=rank)
    trainer = own.session.server_job.trainer
    train(model, optimizer, batches(2, rank, 2))
    own.save_persistables(folder)
    saved = values_of(model)
    own.barrier_worker()  # before either trains on, as state_dict() asks the servers
    train(model, optimizer, batches(4, rank, 2)[2:])
    own.barrier_worker()
    before = values_of(model)
    with pytest.raises(PSError, match=r"the disk is gone\. Tables may be partly loaded: load another save") as caught:
        own.load_model(folder)
    assert not isinstance(caught.value, NothingLoaded)
    found = values_of(model)
    held = trainer.connection.client.wait(trainer.connection.client.pull(trainer.plan.dense_ids, wait_for_others=False))
    for part in trainer.plan.dense:
        assert (part.values() == held[part.table_id]).all()
    assert torch.equal(found["words"], found["words.weight"])  # state_dict() has asked the servers
    assert not same(found, before)
    assert not same(found, saved)
    own.load_model(folder)
    loaded = values_of(model)
    own.stop_worker()
    if mode != "geo":  # where a worker's own differences are not in a save
        assert all(torch.equal(loaded[name], saved[name]) for name in ("words", "out"))
    return str(caught.value), found, loaded


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_workers_have_what_the_servers_hold_when_one_fails_to_load(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server 1 fails at its last table, after it and server 0 have loaded rows and dense parameters."""
    load = server_files._load
    broken: list[int] = []

    def load_or_fail(state: Any, config: Any, table_id: int, dirname: Path) -> int:
        if config.index == 1 and table_id == max(state.tables) and not broken:
            broken.append(1)
            raise CheckpointError("the disk is gone.")
        return load(state, config, table_id, dirname)

    monkeypatch.setattr(server_files, "_load", load_or_fail)
    one, two = run_job(
        partial(load_in_vain, mode=mode, folder=tmp_path), num_servers=2, num_workers=2, strategy=strategy_of(mode)
    )
    assert one[0] == two[0]
    assert same(one[1], two[1])
    assert same(one[2], two[2])


def test_the_first_error_is_raised_when_a_server_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("sync"), make_adagrad)
        train(model, optimizer, batches(2))
        own.save_persistables(tmp_path)
        client = own.session.server_job.trainer.connection.client

        def fail(text: str) -> Any:
            raise PSError(text)

        with monkeypatch.context() as patched:
            patched.setattr(client, "load", lambda *_, **__: fail("it does not answer."))
            patched.setattr(client, "stat", lambda: fail("nor now."))
            with pytest.raises(PSError, match="it does not answer"):
                own.load_model(tmp_path)
        train(model, optimizer, batches(2))  # it was away, and came back
        own.stop_worker()

    run_job(work, strategy=strategy("sync"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradients_from_before_a_load_change_nothing_after_it(mode: str, tmp_path: Path) -> None:
    """No step has taken them; where the load is refused they stay."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy_of(mode), make_sgd, seed=rank)
        train(model, optimizer, batches(2))
        own.save_persistables(tmp_path)
        before = values_of(model)
        ads, words, target = batches(1)[0]
        ((model(ads, words) - target) ** 2).mean().backward()
        with pytest.raises(NothingLoaded):
            own.load_model(tmp_path / "nowhere")
        assert model.module.out.weight.grad is not None
        own.load_model(tmp_path)
        optimizer.step()
        own.barrier_worker()
        assert same(before, values_of(model))
        own.stop_worker()

    run_job(work, strategy=strategy_of(mode))
