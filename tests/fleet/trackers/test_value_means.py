"""Means over workers: exact, the same on every worker, and a worker that logs something else is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.errors import ConfigError
from fleet.trackers.value_means import as_numbers
from tests.helpers.workers import WorkerError, run_workers


def _start(degrees: dict[str, int] | None = None) -> None:
    strategy = fleet.DistributedStrategy()
    if degrees:
        strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)


def _means(rank: int, world_size: int) -> list[dict[str, float]]:
    _start()
    found = [
        fleet.log({"loss": torch.tensor(1.5 + rank, requires_grad=True), "count": rank}),
        fleet.log({"loss": torch.tensor(2.0 * rank, dtype=torch.bfloat16)}, step=7),
        fleet.log({f"value/{index}": index * (rank + 1) for index in range(150)}),
        fleet.log({"b": 1, "a": math.nan if rank else 0.0} if rank else {"a": 0.0, "b": np.float32(2)}),
    ]
    return [dict(each) for each in found]


def test_means_over_three_workers() -> None:
    results = run_workers(_means, 3, backend=None)
    for first, second, many, mixed in results:
        assert first == {"loss": 2.5, "count": 1.0}
        assert second == {"loss": 2.0}
        assert many == {f"value/{index}": index * 2.0 for index in range(150)}
        assert math.isnan(mixed["a"])
        assert mixed["b"] == pytest.approx(4 / 3)


def _staged(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, float]:
    _start(degrees)
    return dict(fleet.log({"loss": [math.nan, 4.0, 7.0, 8.0][rank]}))


@pytest.mark.parametrize(
    ("degrees", "mean"),
    [({"pp_degree": 2, "dp_degree": 2}, {(0, 1): 7.5, (0, 2): 6.0}), ({"mp_degree": 4}, {})],
    ids=["pp2", "mp4"],
)
def test_one_value_for_each_copy_of_the_model(degrees: dict[str, int], mean: dict[Any, float]) -> None:
    """The last stage has the loss; parts of divided layers have it alike, and the first counts."""
    found = run_workers(_staged, 4, degrees, backend=None)
    assert all(str(each) == str(found[0]) for each in found)
    if mean:
        assert found[0]["loss"] in mean.values()
    else:
        assert math.isnan(found[0]["loss"])


def _different(rank: int, world_size: int, what: str) -> None:
    _start()
    fleet.log({"loss": 1.0})
    if what == "names":
        fleet.log({f"loss{rank}": 1.0})
    else:
        fleet.log({"loss": 1.0}, step=10 + rank)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("names", r"rank 0: step 0, values \['loss0'\]\n.*rank 1: step 0, values \['loss1'\]"),
        ("steps", "rank 1: step 11"),
    ],
)
def test_different_calls_are_named_at_once(what: str, expected: str) -> None:
    with pytest.raises(WorkerError, match=f"(?s){expected}"):
        run_workers(_different, 2, what, backend=None)


def _on_one(rank: int, world_size: int, known: bool) -> None:
    _start()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    if known:
        fleet.log({"loss": 1.0})
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        if fleet.is_first_worker():
            fleet.log({"loss": 1.0})


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_a_call_on_one_worker_is_named(known: bool) -> None:
    """The gradients of the other worker are in no case taken for its values."""
    with pytest.raises(WorkerError) as caught:
        run_workers(_on_one, 2, known, backend=None, environment={"FLEET_WAIT_LIMIT": "2"})
    # The first that ends is the one that logs, or the one that the other's end breaks off.
    assert ("the exchange" if known else "not inside `if fleet.is_first_worker():`") in str(caught.value)


def test_numbers() -> None:
    values = {
        "int": 3,
        "bool": True,
        "numpy": np.float32(0.5),
        "array": np.array(2.0),
        "tensor": torch.tensor([[1.5]]),
        "whole": torch.tensor(2**40 + 1),
    }
    assert as_numbers(values) == {
        "int": 3.0, "bool": 1.0, "numpy": 0.5, "array": 2.0, "tensor": 1.5, "whole": float(2**40 + 1),
    }  # fmt: skip
    assert list(as_numbers(values)) == list(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (3.0, "takes a dictionary"),
        ({"": 1.0}, "not empty"),
        ({1: 1.0}, "a name is 1"),
        ({"x": "a"}, "'x' is 'a'; it takes a number"),
        ({"x": None}, "'x' is None"),
        ({"x": 1j}, "'x' is 1j"),
        ({"x": {"y": 1.0}}, r"Log its parts as 'x/\.\.\.'"),
        ({"x": torch.ones(3)}, r"shape \(3,\).*Log its mean"),
        ({"x": torch.tensor(1j)}, "one real number"),
        ({"x": np.ones(3)}, "it takes a number"),
        ({"x": np.datetime64("2026-01-01")}, "it takes a number"),
    ],
)
def test_what_is_no_number_is_refused(values: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)fleet\.log\(\).*{expected}"):
        as_numbers(values)
