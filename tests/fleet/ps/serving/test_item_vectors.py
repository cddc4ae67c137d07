from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from fleet.ps.serving import item_vectors
from fleet.ps.serving.item_vectors import NO_ITEM, ItemVectors

DIM = 5
NONE = np.empty(0, np.int64)


def nearest(items: dict[int, np.ndarray], queries: np.ndarray, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Returns what a search must find, one item after another."""
    ids, scores = [], []
    rows = {key: row.tolist() for key, row in items.items()}
    for query in queries.tolist():
        every = [(-sum(map(operator.mul, row, query)), key) for key, row in rows.items()]
        first = sorted((float(np.float32(score)), key) for score, key in every)[:k]
        lacking = k - len(first)
        ids.append([key for _, key in first] + [NO_ITEM] * lacking)
        scores.append([-score for score, _ in first] + [-np.inf] * lacking)
    return ids, scores


def _check(found: tuple[np.ndarray, np.ndarray], wanted: tuple[list[list[int]], list[list[float]]]) -> None:
    assert (found[0].tolist(), found[1].tolist()) == wanted
    assert (found[0].dtype, found[1].dtype) == (np.int64, np.float32)


@pytest.mark.parametrize("few_values", [False, True])  # with many equal scores, and few
def test_any_changes_leave_what_one_by_one_finds(few_values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_vectors, "_MOST_SCORES", 200)
    random = np.random.default_rng(0)
    items: dict[int, np.ndarray] = {}
    vectors = ItemVectors(DIM)
    for number in range(60):
        ids = np.unique(random.integers(-50, 50, random.integers(0, 20)))
        rows = random.normal(size=(len(ids), DIM)).astype(np.float32)
        rows = np.round(rows) if few_values else rows
        deleted = np.setdiff1d(np.array(sorted(items), np.int64), ids)[: random.integers(0, 15)]
        before = vectors.search(np.ones((1, DIM), np.float32), 4)
        after = vectors.applied(ids, rows, deleted)
        _check(vectors.search(np.ones((1, DIM), np.float32), 4), (before[0].tolist(), before[1].tolist()))
        vectors = after.rebuilt(lambda _: None) if number % 7 == 6 else after
        for key in deleted.tolist():
            del items[key]
        items.update(zip(ids.tolist(), rows, strict=True))
        queries = random.normal(size=(6, DIM)).astype(np.float32)
        queries = np.round(queries) if few_values else queries
        assert len(vectors) == len(items)
        for k in (1, 7, 200):
            _check(vectors.search(queries, k), nearest(items, queries, k))


def test_equal_scores_are_in_the_order_of_ids() -> None:
    ids = np.arange(-500, 500)
    for row in (np.zeros(DIM), np.random.default_rng(1).normal(size=DIM)):
        vectors = ItemVectors(DIM).applied(ids, np.tile(row.astype(np.float32), (1000, 1)), NONE)
        vectors = vectors.rebuilt(lambda _: None)
        vectors = vectors.applied(ids[3:500:7], np.tile(row.astype(np.float32), (71, 1)), NONE)
        found, scores = vectors.search(np.ones((3, DIM), np.float32), 10)
        assert found.tolist() == 3 * [ids[:10].tolist()]
        assert len(np.unique(scores)) == 1


def test_rounding_of_products_loses_nothing() -> None:
    """Scores that differ in their last bits: without a margin a matrix product confuses some of them."""
    random = np.random.default_rng(2)
    rows = np.tile(random.normal(size=64), (4000, 1)) + 1e-6 * random.normal(size=(4000, 64))
    rows = rows.astype(np.float32)
    vectors = ItemVectors(64).applied(np.arange(4000), rows, NONE)
    queries = random.normal(size=(9, 64)).astype(np.float32)
    exact = (rows.astype(np.float64)[None] * queries[:, None]).sum(axis=2).astype(np.float32)
    wanted = [np.lexsort((np.arange(4000), -row))[:5].tolist() for row in exact]
    assert vectors.search(queries, 5)[0].tolist() == wanted


def test_a_base_is_due_when_an_eighth_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_vectors, "_FEWEST_DUE", 10)
    rows = np.ones((800, DIM), np.float32)
    ids = np.arange(800)
    vectors = ItemVectors(DIM).applied(ids, rows, NONE)
    assert vectors.is_due
    vectors = vectors.rebuilt(lambda _: None)
    assert not vectors.is_due
    assert not vectors.applied(NONE, rows[:0], ids[:100]).is_due
    assert vectors.applied(NONE, rows[:0], ids[:101]).is_due
    assert not vectors.applied(ids[:50], rows[:50], NONE).is_due  # dead in the base, and among the recent ones
    assert vectors.applied(ids[:51], rows[:51], NONE).is_due
    assert not ItemVectors(DIM).applied(ids[:10], rows[:10], NONE).is_due


def test_an_approximate_base_is_asked_for_what_lives_in_it() -> None:
    class Odd:
        """Finds items of odd places alone."""

        def __init__(self, rows: np.ndarray) -> None:
            self.rows = rows

        def nearest(self, queries: np.ndarray, k: int, live: np.ndarray):
            places = np.flatnonzero(live & (np.arange(len(live)) % 2 == 1))
            return itertools.repeat(places, len(queries))

    rows = np.arange(10, dtype=np.float32)[:, None]
    vectors = ItemVectors(1).applied(np.arange(10), rows, NONE).rebuilt(Odd)
    one = np.ones((1, 1), np.float32)
    assert vectors.search(one, 3)[0].tolist() == [[9, 7, 5]]
    assert vectors.search(one, 3, exact=True)[0].tolist() == [[9, 8, 7]]
    vectors = vectors.applied(np.array([4]), np.array([[8.5]], np.float32), np.array([7]))
    assert vectors.search(one, 3)[0].tolist() == [[9, 4, 5]]
    assert vectors.search(one, 3, exact=True)[0].tolist() == [[9, 4, 8]]
