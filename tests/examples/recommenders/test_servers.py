"""The models on servers: as plain torch in sync mode, in every mode, and served."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.facade import Fleet
from tests.examples.recommenders.example import example_module
from tests.examples.recommenders.small_models import batch_of, small_net
from tests.helpers.served import run_job, strategy_of

models = example_module("models")
parts = example_module("models.parts")
tables = example_module("tables")

NAMES = sorted(models.MODELS)
SETTINGS = {"all": {"initializer": ["normal", 0.0, 0.3]}}
STEPS, WORKERS = 7, 2
_SEEDING = threading.Lock()


def made(name: str, *, local: bool) -> Any:
    """Returns the model with the same weights on every worker, and in plain torch."""
    with _SEEDING:
        torch.manual_seed(0)
        return small_net(name, tables.Tables(SETTINGS, local=local))


def data(name: str, worker: int) -> list[dict[str, torch.Tensor]]:
    return [*(batch_of(name, 100 * step + worker) for step in range(STEPS)), *asked(name)]


def asked(name: str) -> list[dict[str, torch.Tensor]]:
    """Returns the batches that are predicted at the end; training has met their ids."""
    return [batch_of(name, 9000 + size, size) for size in (8, 1, 23)]


def in_plain_torch(name: str, rule: Any) -> Any:
    """Returns the model after steps on the mean loss of all workers' batches."""
    net = made(name, local=True)
    optimizer = rule(net.parameters())
    for batches in zip(*(data(name, worker) for worker in range(WORKERS)), strict=True):
        (sum(net.loss(net(batch), batch) for batch in batches) / WORKERS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def trained(name: str, mode: str, rule: Any, then: Any = None) -> list[Any]:
    """Trains on servers; returns the outputs of each worker's model for one more batch."""
    workers = 1 if mode == "hybrid" else WORKERS  # threads have no rendezvous; test_train.py has two processes
    strategy = strategy_of(mode, workers)

    def work(own: Fleet, rank: int) -> Any:
        own_strategy = strategy_of(mode, workers)
        net = made(name, local=False)
        optimizer = own.distributed_optimizer(rule(net.parameters()), own_strategy)
        model = own.distributed_model(net)
        own.init_worker()
        losses = []
        for batch in own.prefetch(data(name, rank)):
            loss = net.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        own.barrier_worker()
        with torch.no_grad():
            found = net.eval()(asked(name)[0])
        if then is not None:
            then(own, net)
        own.stop_worker()
        return losses, found

    return run_job(work, num_workers=workers, strategy=strategy)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, 0.05)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_sync_training_equals_plain_torch(name: str) -> None:
    """Issue 43: two workers and a server train as one process on both batches, with the rule of the example."""
    net = in_plain_torch(name, adagrad)
    with torch.no_grad():
        expected = net.eval()(asked(name)[0])
        start = made(name, local=True)(asked(name)[0])
    for _, found in trained(name, "sync", adagrad):
        for output, values in expected.items():
            torch.testing.assert_close(found[output], values, rtol=0, atol=1e-5)
    assert any(not torch.allclose(start[output], values, atol=1e-2) for output, values in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
@pytest.mark.parametrize("name", NAMES)
def test_each_mode_trains_each_model(name: str, mode: str) -> None:
    """Issue 43."""
    start = made(name, local=True)(asked(name)[0])
    for losses, found in trained(name, mode, sgd):
        assert len(losses) == STEPS + 3
        assert all(torch.isfinite(values).all() for values in found.values())
        assert any(not torch.allclose(found[output], values, atol=1e-4) for output, values in start.items())


@pytest.mark.parametrize("name", ["din", "esmm"])
def test_a_predictor_answers_as_the_model(name: str, tmp_path: Path) -> None:
    """Issue 43: histories and two heads, with batches of other sizes than the example."""
    batches = asked(name)
    expected: list[Any] = []

    def save(own: Fleet, net: Any) -> None:
        example = {column: batches[0][column] for column in net.INPUTS}
        own.save_inference_model(dirname=str(tmp_path), example_inputs=(example,))
        if own.is_first_worker():
            with torch.no_grad():
                expected.extend(net({column: one[column] for column in net.INPUTS}) for one in batches)

    trained(name, "sync", adagrad, save)
    predictor = fleet.ps.Predictor(tmp_path)
    try:
        for batch, outputs in zip(batches, expected, strict=True):
            found = predictor({column: batch[column] for column in models.MODELS[name].INPUTS})
            assert found.keys() == outputs.keys()
            for output, values in outputs.items():
                torch.testing.assert_close(found[output], values, rtol=0, atol=1e-6)
    finally:
        predictor.reader.close()


@pytest.mark.parametrize("name", ["dssm", "sasrec"])
def test_vectors_of_users_and_items_are_exported(name: str, tmp_path: Path) -> None:
    """A retrieval service asks for a user's vector: the program of that alone, with rows from the tables."""
    batch = batch_of("dssm", 1)
    expected = {}

    def save(own: Fleet, net: Any) -> None:
        parts = {"user": parts_of(net, "user", batch), "item": parts_of(net, "item", batch)}
        with torch.no_grad():
            found = {side: part(given) for side, (part, given) in parts.items()}
        own.save_inference_model(dirname=str(tmp_path))
        if own.is_first_worker():
            expected.update(found)
            for side, (part, given) in parts.items():
                fleet.ps.export(part, (given,), tmp_path / side)

    trained(name, "sync", adagrad, save)
    reader = fleet.ps.Reader(tmp_path)
    try:
        for side, values in expected.items():
            found = fleet.ps.Predictor(tmp_path / side, reader)(parts_of(made(name, local=False), side, batch)[1])
            torch.testing.assert_close(found, values, rtol=0, atol=1e-6)
    finally:
        reader.close()


def parts_of(net: Any, side: str, batch: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    part = parts.Vectors(net, side)
    return part, {column: batch[column] for column in part.INPUTS}


def test_a_copy_of_the_settings_names_its_tables() -> None:
    made_tables = tables.Tables(copy.deepcopy({**SETTINGS, "colour": {"max_rows": 5}}), local=False)
    small_net("deepfm", made_tables)
    with pytest.raises(SystemExit, match=r"\['colour'\]; the model has"):
        made_tables.check()
