"""What metrics take, and the area under a curve."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fleet.errors import ConfigError
from fleet.metrics.metric_values import area_under, checked_batch, ids_of, places_of, util_of


def test_batches_are_flat_and_checked() -> None:
    scores, labels = checked_batch("f", torch.tensor([[0.25, 0.75]], dtype=torch.bfloat16), [[1]])
    assert (scores.tolist(), labels.tolist()) == ([0.75], [1])
    with pytest.raises(ConfigError, match=r"f\(\): 1 predictions and 2 labels"):
        checked_batch("f", [0.5], [1, 0])


def test_area() -> None:
    assert area_under(np.array([0, 2]), np.array([2, 0])) == 1.0
    assert area_under(np.array([1]), np.array([1])) == 0.5


def test_a_scope_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch has no scopes"):
        util_of(None, object())


def test_places_are_in_the_order_of_predictions() -> None:
    scores = np.array([0.0, -0.0, 1e-30, 0.5, 1.0])
    assert places_of(scores, 4).tolist() == [0, 0, 0, 2, 3]
    exact = places_of(scores, None)
    assert exact[0] == exact[1]
    assert (np.diff(exact[1:]) > 0).all()


def test_ids_are_integers() -> None:
    assert ids_of("f(x)", np.array([[2**64 - 1]], np.uint64)).tolist() == [[-1]]
    assert ids_of("f(x)", []).dtype == np.int64
    with pytest.raises(ConfigError, match=r"f\(x\): ids are integers, got dtype float64"):
        ids_of("f(x)", [0.5])
    with pytest.raises(ConfigError, match=r"makes floats of a list with numbers from 2\*\*63 on"):
        ids_of("f(x)", [2**63, 5])
