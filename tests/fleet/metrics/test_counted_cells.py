"""Counted cells: memory by keys, and what one round exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.metrics import counted_cells
from fleet.metrics.counted_cells import CountedCells, auc_of, gauc_of
from tests.helpers.scikit_learn import roc_auc_score


class Replicas:
    """Stands for a job of several workers: what each would pass is known, and all calls of the first are recorded."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.sizes: list[int] = []

    def all_reduce(self, value: Any, mode: str) -> Any:
        assert mode == "sum"
        return value * len(self.parts)

    def all_gather(self, value: Any) -> list[Any]:
        self.sizes.append(value.size * len(self.parts))
        return [value.copy() for _ in self.parts]


def test_cells_are_merged_by_their_keys() -> None:
    cells = CountedCells(num_keys=2)
    cells.add(np.array([7, 7, 1]), np.array([5, 5, 9]), np.array([True, False, True]))
    cells.add(np.array([7]), np.array([5]), np.array([True]))
    assert cells.merged().tolist() == [[1, 7], [9, 5], [1, 2], [0, 1]]
    for _ in range(3):
        cells.add(np.zeros(70_000, np.int64), np.zeros(70_000, np.int64), np.ones(70_000, bool))
    assert not cells._new  # merged without being asked: memory grows with keys, not with samples
    cells.clear()
    assert cells.merged().shape == (4, 0)


@pytest.mark.parametrize("workers", [1, 5])
def test_a_range_of_places_holds_at_most_two_rounds(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_cells, "_ROUND", 1000)
    random = np.random.default_rng(0)
    # Places that crowd, as the predictions of rare events do.
    places = (random.beta(0.2, 50, 20_000) * 1e9).astype(np.int64)
    labels = random.integers(0, 2, 20_000) == 1
    cells = CountedCells(num_keys=1)
    cells.add(places, labels)
    util: Any = Replicas([None] * workers)
    assert auc_of(cells.merged(), util) == pytest.approx(roc_auc_score(labels, places), abs=1e-12)
    assert len(util.sizes) > 5 * workers
    assert max(util.sizes[1:]) <= 2 * 1000 * 3


def test_a_round_of_users_is_about_as_large_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_cells, "_ROUND", 1000)
    cells = CountedCells(num_keys=2)
    cells.add(np.repeat(np.arange(2000), 2), np.tile([1, 2], 2000), np.tile([False, True], 2000))
    util: Any = Replicas([None])
    assert gauc_of(cells.merged(), util) == 1.0
    assert len(util.sizes) == 4
    assert max(util.sizes) <= 1200 * 4


def test_a_state_of_other_bins_is_refused() -> None:
    cells = CountedCells(num_keys=1)
    with pytest.raises(CheckpointError, match=r"\(bins=None\) cannot load samples of CountedCells\(bins=4\)"):
        cells.load(cells, cells.state(cells, 4), None)
