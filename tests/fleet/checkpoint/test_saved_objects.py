"""What a script gives to save() and load(): keys, kinds, values, and states that differ between workers."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet import checkpoint, fleet
from fleet.checkpoint.saved_objects import adapters_of, own_state_of
from fleet.errors import CheckpointError, ConfigError
from fleet.job.axes import Axes
from tests.helpers.workers import run_workers

VALUES = {
    "epoch": 3,
    "best": float("inf"),
    "name": "run",
    "nothing": None,
    "history": [1, 2.5, {"a": (1, 2)}],
    "tensor": torch.arange(6).view(2, 3),
    "array": np.arange(3, dtype=np.int16),
    "mapping": OrderedDict([(1, torch.ones(2)), (2, b"bytes")]),
}


def equal(one: Any, other: Any) -> bool:
    """Returns whether two values are equal, tensors included."""
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_values_and_states_come_back(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checkpoint.save(tmp_path, {**VALUES, "scheduler": scheduler, "scaler": scaler})
    other = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    second = torch.amp.GradScaler("cpu", init_scale=2.0)
    given = {**dict.fromkeys(VALUES, 0), "scheduler": other, "scaler": second}
    found = checkpoint.load(tmp_path, given)
    assert equal({key: found[key] for key in VALUES}, VALUES)
    assert found["scheduler"] is other
    assert other.state_dict() == scheduler.state_dict()
    assert second.state_dict() == scaler.state_dict()
    assert given["epoch"] == 0, "the dictionary of the caller is as it was"


def test_a_part_of_the_keys_can_be_loaded_and_everything_without_any(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, {"model": model, "optimizer": optimizer, **VALUES})
    assert checkpoint.load(tmp_path, {"epoch": 0}) == {"epoch": 3}
    found = checkpoint.load(tmp_path)
    assert torch.equal(found["model"]["weight"], model.weight)
    assert torch.equal(found["optimizer"]["weight/exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert equal({key: found[key] for key in VALUES}, VALUES)


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({}, "an empty one"),
        ([nn.Linear(1, 1)], "got list"),
        ({"a/b": 1}, "the key 'a/b'"),
        ({"": 1}, "the key ''"),
        ({3: 1}, "the key 3"),
        ({"f": lambda: 1}, "'f' is a builtins.function"),
        ({"x": {"y": object()}}, "'x/y' is a builtins.object"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_written(tmp_path: Path, objects: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpoint.save(tmp_path / "new", objects)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"modle": nn.Linear(1, 1)}, "has no 'modle'.*Did you mean 'model'"),
        ({"model": 3}, "'model' was saved from a module and is a value here"),
        ({"epoch": nn.Linear(1, 1)}, "'epoch' was saved from a value and is a module here"),
    ],
)
def test_another_kind_of_object_is_refused(tmp_path: Path, objects: Any, said: str) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(1, 1), "epoch": 3})
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path, objects)


def test_modules_are_taken_first() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    adapters = adapters_of({"epoch": 1, "optimizer": optimizer, "model": model}, None, Axes({}, 0), "call")
    assert [adapter.kind for adapter in adapters] == ["module", "optimizer", "value"]
    assert not own_state_of([optimizer], None)


def differing(rank: int, world_size: int, path: str) -> list[Any]:
    """Saves a value that differs between workers, and loads it."""
    fleet.init(is_collective=True)
    fleet.checkpoint.save(path, {"position": {"at": rank * 10, "t": torch.full((2,), rank)}, "same": 5})
    found = fleet.checkpoint.load(path, {"position": 0, "same": 0})
    return [found["position"]["at"], found["position"]["t"].tolist(), found["same"]]


def test_each_worker_gets_its_own_where_they_differ(tmp_path: Path) -> None:
    assert run_workers(differing, 2, f"{tmp_path}", backend=None) == [[0, [0, 0], 5], [10, [1, 1], 5]]
    with pytest.raises(CheckpointError, match="'position' was different on each of 2 workers, and there are 1 now"):
        checkpoint.load(tmp_path, {"position": 0})
    assert checkpoint.load(tmp_path, {"same": 0}) == {"same": 5}


class TwoNets:
    """Two networks with the same names of parameters, and an optimizer of each, which has made one step more."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.found: dict[str, Any] = {}
        for number, (key, rule) in enumerate([("G", "og"), ("D", "od")]):
            net = nn.Linear(2, 2)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            for _ in range(steps + number):
                net(torch.full((1, 2), number + 1.0)).sum().backward()
                optimizer.step()
            self.found |= {key: net, rule: optimizer}

    def of(self, key: str) -> list[Any]:
        """Returns the numbers of one object."""
        state = self.found[key].state_dict()
        entries = [state] if "state" not in state else state["state"].values()
        return [value.tolist() for entry in entries for value in entry.values()]


@pytest.mark.parametrize("keys", ["G D og od", "od og D G", "D od", "G og", "od", "og", "D og G"])
def test_two_models_of_the_same_names_load_in_any_order_and_in_part(tmp_path: Path, keys: str) -> None:
    saved, other = TwoNets(seed=0, steps=1), TwoNets(seed=1, steps=3)
    checkpoint.save(tmp_path, saved.found)
    checkpoint.load(tmp_path, {key: other.found[key] for key in keys.split()})
    for key in saved.found:
        assert (other.of(key) == saved.of(key)) == (key in keys.split())


def one_of_two_wrapped(rank: int, world_size: int, path: str) -> list[bool]:
    """Saves two wrapped models, and loads each of their optimizers alone."""
    fleet.init(is_collective=True)
    saved = TwoNets(seed=0, steps=1).found
    wrapped: dict[str, Any] = {key: fleet.distributed_model(saved[key]) for key in ("G", "D")}
    wrapped |= {key: fleet.distributed_optimizer(saved[key]) for key in ("og", "od")}
    fleet.checkpoint.save(path, wrapped)
    found = []
    for key in ("od", "og"):
        before = [entry["exp_avg"].clone() for entry in saved[key].state.values()]
        for entry in saved[key].state.values():
            entry["exp_avg"].fill_(9)
        fleet.checkpoint.load(path, {key: wrapped[key]})
        after = [entry["exp_avg"] for entry in wrapped[key].user_optimizer.state.values()]
        found.append(all(torch.equal(one, other) for one, other in zip(before, after, strict=True)))
    return found


def test_the_optimizer_of_a_wrapped_model_loads_without_it(tmp_path: Path) -> None:
    assert run_workers(one_of_two_wrapped, 1, f"{tmp_path}", backend=None) == [[True, True]]


def test_one_optimizer_of_two_models_loads_in_any_order(tmp_path: Path) -> None:
    saved, other = TwoNets(seed=0, steps=1).found, TwoNets(seed=1, steps=1).found
    both = [torch.optim.Adam([*nets["G"].parameters(), *nets["D"].parameters()]) for nets in (saved, other)]
    both[0].step()
    checkpoint.save(tmp_path, {"G": saved["G"], "D": saved["D"], "both": both[0]})
    checkpoint.load(tmp_path, {"both": both[1], "D": other["D"], "G": other["G"]})
    one, two = (list(optimizer.state_dict()["state"].values()) for optimizer in both)
    assert [entry["exp_avg"].tolist() for entry in one] == [entry["exp_avg"].tolist() for entry in two]
