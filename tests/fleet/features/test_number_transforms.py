"""Bucketize, Clip and Log against numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import ConfigError
from fleet.features import Bucketize, Clip, Log, Transforms

VALUES = np.array([-3.5, -1, 0, 0.5, 1, 17, 18, 1e30, np.inf, -np.inf, np.nan], np.float32)


def of(transform: Any, values: Any) -> Any:
    return Transforms([transform])({"x": values})["x"]


def test_bucketize_is_that_of_torch() -> None:
    for values in (VALUES, VALUES.astype(np.float64), np.array([-3, 0, 1, 18, 2**40])):
        found = of(Bucketize("x", [-1, 0.5, 18]), values)
        edges = torch.tensor([-1, 0.5, 18], dtype=torch.float64)
        assert found.dtype == np.int64
        assert found.tolist() == torch.bucketize(torch.from_numpy(values).double(), edges, right=True).tolist()


def test_bucketize_is_exact_above_2_to_53() -> None:
    big = 2**53
    edges = [-(2.0**70), -(2**63), -2.5, big, big + 1, 2**63 - 1, 2**63, 10**30]
    values = [-(2**63), -(2**63) + 1, -3, -2, big - 1, big, big + 1, big + 2, 2**63 - 2, 2**63 - 1]
    found = of(Bucketize("x", edges), np.array(values))
    assert found.tolist() == [sum(edge <= value for edge in edges) for value in values]
    floats = [float(np.float32(value)) for value in (big, big * (1 + 2**-23), 2.0**63, 1e30, 2e30)]
    found = of(Bucketize("x", edges), np.array(floats))
    assert found.tolist() == [sum(edge <= value for edge in edges) for value in floats]
    with pytest.raises(ConfigError, match="finite"):
        Bucketize("x", [10**400])


def test_clip() -> None:
    found = of(Clip("x", -1, 2.5), VALUES)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.clip(VALUES, -1, 2.5))
    assert of(Clip("x", low=0.5), np.array([-1, 0, 1, 5])).tolist() == [1, 1, 1, 5]  # integers stay integers
    assert of(Clip("x", high=2.5), np.array([-1, 3], np.int8)).tolist() == [-1, 2]


def test_log() -> None:
    found = of(Log("x"), VALUES)
    expected = np.log(np.maximum(VALUES.astype(np.float64), 0) + 1).astype(np.float32)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    assert of(Log("x", offset=2.0), np.array([0, 6])).tolist() == np.log([2.0, 8.0]).astype(np.float32).tolist()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: Bucketize("x", []), "ascend"),
        (lambda: Bucketize("x", [2, 1]), "ascend"),
        (lambda: Bucketize("x", [1, 1]), "ascend"),
        (lambda: Bucketize("x", [1, float("nan")]), "finite"),
        (lambda: Clip("x"), "low is at most high"),
        (lambda: Clip("x", 2, 1), "low is at most high"),
        (lambda: Clip("x", "1"), "finite number"),  # type: ignore[arg-type]
        (lambda: Log("x", offset=0), "above 0"),
        (lambda: Log("x", offset=True), "finite number"),
        (lambda: Log(""), "a column's name"),
        (lambda: Log("a.offsets"), "a column's name"),
        (lambda: Log("a", out="b.offsets"), "a column's name"),
    ],
)
def test_wrong_values(made: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made()
