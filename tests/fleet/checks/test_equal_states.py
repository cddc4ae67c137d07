"""States that one worker alone loads after the model was wrapped."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fleet as package
from fleet import fleet
from tests.helpers.checked_training import OPTIONS, batch, flat, job, message, network, step_once, weights
from tests.helpers.workers import run_workers


def saved() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 0.5) for name, value in network().state_dict().items()}


def plain_module(rank: int) -> None:
    net, _, optimizer, model = job({})
    if rank == 0:
        net.load_state_dict(saved())
    model(batch(0, rank))
    assert float(net[2].bias.detach()) == 0.5


def second_worker(rank: int) -> None:
    _, _, optimizer, model = job({})
    if rank == 1:
        model.load_state_dict(saved())
    step_once(model, optimizer, 0)


def different_states(rank: int) -> None:
    _, _, optimizer, model = job({})
    model.load_state_dict({name: value + rank for name, value in saved().items()})
    step_once(model, optimizer, 0)


def momentum_of_one(rank: int) -> None:
    net, raw, optimizer, model = job({})
    step_once(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    net, raw, optimizer, model = job({})
    if rank == 0:
        optimizer.load_state_dict(state)
    step_once(model, optimizer, 1)


def momentum_before_wrapping(rank: int) -> None:
    net = network()
    raw = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if rank == 0:
        net(batch(0, 0)).sum().backward()
        raw.step()
        raw.zero_grad()
    job({})
    model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(raw)
    step_once(model, optimizer, 1)


WRONG = (second_worker, different_states, momentum_of_one, momentum_before_wrapping)


def load_alone(rank: int, world_size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for option, options in OPTIONS.items():

        def first_worker(options: Any = options, option: str = option) -> None:
            _, _, _, model = job(options)
            if fleet.is_first_worker():
                model.set_state_dict({**saved(), "epoch": 3})
            model(batch(0, rank)).square().mean().backward()
            found[f"{option} start"] = model.full_state_dict()["2.bias"]

        found[option] = message(first_worker)
    plain_module(rank)
    return found | {wrong.__name__: message(partial(wrong, rank)) for wrong in WRONG}


def test_a_state_that_worker_0_alone_loads() -> None:
    """Issue 9, 004-15: after distributed_model() it is every worker's, or the first forward says who did not load."""
    first, second = run_workers(load_alone, 2, backend=None)
    for option in OPTIONS:
        if option == "stage 3":
            assert "Worker 0 loaded the model's state" in first[option], option
            assert "and worker 1 did not" in second[option], option
        else:
            assert first[option] == second[option] == "", option
            for found in (first, second):
                assert float(found[f"{option} start"]) == 0.5, option
    assert "Worker 1 loaded the model's state" in first["second_worker"]
    assert "test_equal_states.py:" in first["second_worker"]
    assert "different values of '0.weight' (worker 1 against worker 0)" in first["different_states"]
    assert "Worker 0 loaded the optimizer's state" in first["momentum_of_one"]
    assert "momentum_buffer of parameter 0" in first["momentum_before_wrapping"]


def load_later(rank: int, world_size: int) -> dict[str, Any]:
    """Loads in the middle of training: on all workers, and then on worker 0 alone."""
    found: dict[str, Any] = {}
    net, _, optimizer, model = job({})
    step_once(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step in range(2):
        step_once(model, optimizer, step)
        model.module.load_state_dict(saved[0])
        optimizer.set_state_dict(saved[1])
    step_once(model, optimizer, 2)
    found["all"] = weights(model)
    if rank == 0:
        model.module.load_state_dict(saved[0])
        begun = time.monotonic()
        found["one"] = message(lambda: step_once(model, optimizer, 3))
        found["waited"] = time.monotonic() - begun
    else:
        with contextlib.suppress(RuntimeError):  # worker 0 leaves
            step_once(model, optimizer, 3)
    return found


def test_a_state_that_is_loaded_between_two_steps() -> None:
    first, second = run_workers(load_later, 2, backend=None, environment={"FLEET_WAIT_LIMIT": "1"})
    torch.testing.assert_close(first["all"], second["all"], atol=0, rtol=0)
    assert "and worker 1 did not" in first["one"]
    assert first["waited"] < 20


def follow_the_guide(rank: int, world_size: int, path: str) -> list[float]:
    """Runs the load of Fleet's elastic guide and of docs/guides/checkpoint.md, after the model was wrapped."""
    _, _, optimizer, model = job({})
    start_epoch = 0
    if int(fleet.local_rank()) == 0 and os.path.isfile(path):
        state = fleet.load(path)
        model.set_state_dict(state)
        start_epoch = state["epoch"] + 1
    start_epoch = int(fleet.util.all_gather(start_epoch)[0])
    for epoch in range(start_epoch, 4):
        step_once(model, optimizer, epoch)
    return [start_epoch, *weights(model).tolist()]


def test_the_load_of_the_elastic_guide(tmp_path: Path) -> None:
    """004-07, 004-08, 004-15: worker 0 alone reads, every worker goes on from there."""
    path = tmp_path / "resnet.pdparams"
    package.save({**saved(), "epoch": 1}, path)
    first, second = run_workers(follow_the_guide, 2, f"{path}", backend=None)
    assert first == second
    net = network()
    net.load_state_dict(saved())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in (2, 3):
        optimizer.zero_grad()
        net(torch.cat([batch(step, 0), batch(step, 1)])).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(first), torch.cat([torch.tensor([2.0]), flat(net.state_dict())]))


def load_one_part(rank: int, world_size: int, path: str) -> str:
    """Worker 0 saves its part of a divided model; all load it."""
    _, _, optimizer, model = job({"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 3}})
    step_once(model, optimizer, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            torch.save(model.state_dict(), path)
        step_once(model, optimizer, 0)
        model.load_state_dict(torch.load(path, weights_only=False))
    return message(lambda: step_once(model, optimizer, 1))


def test_the_part_of_one_worker_is_not_everyones(tmp_path: Path) -> None:
    for said in run_workers(load_one_part, 2, str(tmp_path / "part.pt"), backend=None):
        assert "Every worker loaded the same shard" in said


def settings_by_rank(rank: int, world_size: int) -> str:
    net, _, _, model = job({})
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1 * (rank + 1)))
    return message(lambda: step_once(model, optimizer, 0))


def test_an_optimizer_with_other_settings_is_named() -> None:
    """Issue 9: different optimizers on ranks drifted apart without a word."""
    for said in run_workers(settings_by_rank, 2, backend=None):
        assert "'lr of group 0' (worker 1 against worker 0)" in said
