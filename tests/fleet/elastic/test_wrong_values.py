"""Every argument of ``fleet.elastic`` set to a wrong value: an error that names it, and nothing was changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import CheckpointError, ConfigError
from tests.helpers.fleets import own_fleet

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
HERE = Path(__file__)


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)
    fleet.init(is_collective=True, log_level="ERROR")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", 3),
        ("path", ""),
        ("path", f"{HERE}"),
        ("model", None),
        ("optimizer", 3),
        ("scheduler", 3),
        ("epoch", -1),
        ("epoch", 1.5),
        ("data", 3),
        ("keep", 0),
        ("keep", "x"),
        ("asynchronous", "yes"),
        ("every", -1),
    ],
)
def test_checkpoint(name: str, value: object, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"path": tmp_path / "made", "model": MODEL, "optimizer": OPTIMIZER, name: value}
    with pytest.raises(ConfigError) as caught:
        fleet.elastic.Checkpoint(**arguments)
    assert f"{name}={value!r}" in f"{caught.value}"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("name", "value"), [("epoch", "x"), ("epoch", -2), ("epoch", 1.7), ("wait", "no")])
def test_save(name: str, value: object, tmp_path: Path) -> None:
    checkpoint = fleet.elastic.Checkpoint(tmp_path / "made", MODEL, OPTIMIZER)
    with pytest.raises(ConfigError) as caught:
        checkpoint.save(**{name: value})  # type: ignore[arg-type]
    assert f"{name}={value!r}" in f"{caught.value}"
    assert checkpoint.epoch == 0
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", 3),
        ("shuffle", "x"),
        ("seed", "x"),
        ("seed", -1),
        ("seed", 1.5),
        ("drop_last", 2),
        ("num_workers", 0),
        ("num_workers", "x"),
        ("num_workers", 2.0),
        ("rank", "x"),
        ("rank", 2),
        ("rank", -1),
    ],
)
def test_sampler(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"dataset": range(5), "num_workers": 2, "rank": 0, name: value}
    with pytest.raises(ConfigError) as caught:
        fleet.elastic.ElasticSampler(**arguments)
    assert f"{name}={value!r}" in f"{caught.value}"


GOOD = {"epoch": 1, "done": 2, "seed": 0, "shuffle": True, "num_samples": 5}


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("set_epoch", "x"),
        ("record", "x"),
        ("record", -1),
        ("record", 1.5),
        ("batches", 3),
        ("load_state_dict", 3),
        ("load_state_dict", {"epoch": 1}),
        ("load_state_dict", {**GOOD, "epoch": "x"}),
        ("load_state_dict", {**GOOD, "done": 99}),
        ("load_state_dict", {**GOOD, "seed": 7}),
    ],
)
def test_calls_of_the_sampler(call: str, value: object) -> None:
    sampler = fleet.elastic.ElasticSampler(range(5))
    before = sampler.state_dict()
    with pytest.raises((ConfigError, CheckpointError), match=call):
        getattr(sampler, call)(value)
    assert sampler.state_dict() == before
    sampler.load_state_dict(GOOD)
    assert sampler.done == 2


KEEP, SCALE = fleet.elastic.keep_global_batch, fleet.elastic.scale_lr


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (KEEP, "strategy", 3),
        (KEEP, "workers", 0),
        (KEEP, "workers", 2.0),
        (KEEP, "workers", True),
        (SCALE, "optimizer", 3),
        (SCALE, "workers", -2),
        (SCALE, "workers", "x"),
        (SCALE, "rule", "cube"),
    ],
)
def test_another_number_of_workers(call: Callable[..., object], name: str, value: object) -> None:
    strategy, groups = fleet.DistributedStrategy(), copy.deepcopy(OPTIMIZER.state_dict()["param_groups"])
    first: dict[str, Any] = {"strategy": strategy} if call is KEEP else {"optimizer": OPTIMIZER}
    with pytest.raises(ConfigError) as caught:
        call(**{**first, "workers": 2, name: value})
    assert f"{name}={value!r}" in f"{caught.value}"
    assert not strategy.gradient_merge
    assert OPTIMIZER.state_dict()["param_groups"] == groups


def test_heartbeat() -> None:
    with pytest.raises(ConfigError, match=r"heartbeat\(pause='x'\) takes True or False"):
        fleet.heartbeat(pause="x")  # type: ignore[arg-type]


def test_faults() -> None:
    """The event injector of the tests is no exception: a fault that would never happen is an error at the start."""
    from fleet.elastic.faults import Faults

    for text in ("step", "step:explode", "nowhere:kill", "step:kill:rank=x", "step:kill:day=3"):
        with pytest.raises(ConfigError, match="FLEET_FAULTS has"):
            Faults.read(text)
