"""Kernels and their oracles in numpy compute the same (decision 4)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.ps import (
    Accessor,
    CountFilterEntry,
    Initializer,
    ProbabilityEntry,
    Rule,
    SparseTableConfig,
    UniqueKeys,
    sum_rows,
)
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.ids import sum_by_key
from fleet.ps.table.rules import RULES
from tests.fleet.ps import reference_ids
from tests.fleet.ps._tables import assert_same_rows, rows_of
from tests.fleet.ps.reference_store import table_of

KEYS = st.one_of(st.integers(-40, 40), st.sampled_from([2**63 - 1, -(2**63)]))
SPARSE_RULES = [name for name, spec in RULES.items() if spec.sparse]
ACCESSORS = [
    None,
    Accessor(),
    Accessor("CtrCommonAccessor", embedx_threshold=0.25),
    Accessor("UnitAccessor", create_by_score=True, zero_init=False),
]
BOUNDS = [
    None,
    Bounds(max_rows=17),
    Bounds(max_rows=9, evict="lfu"),
    Bounds(evict="ttl", ttl_days=2),
    Bounds(max_rows=25, evict="ttl", ttl_days=1),
]
ENTRIES = [None, CountFilterEntry(3), ProbabilityEntry(0.5)]


@pytest.mark.parametrize("rule", SPARSE_RULES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_same_requests_make_the_same_table(rule: str, data: st.DataObject) -> None:
    """Any sequence of pulls, pushes, adds, shrinks and days."""
    draw = data.draw
    kind = draw(st.sampled_from(["constant", "uniform", "normal", "truncated_normal"]))
    config = SparseTableConfig(
        "t",
        draw(st.integers(3, 20)),
        Rule(rule),
        accessor=draw(st.sampled_from(ACCESSORS)),
        entry=draw(st.sampled_from(ENTRIES)),
        create_on=draw(st.sampled_from(["pull", "push"])),
        initializer=Initializer(kind, -0.5) if kind == "constant" else Initializer(kind, -0.5, 0.5),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        bounds=draw(st.sampled_from(BOUNDS)),
    )
    tables = [table_of(config, use) for use in (True, False)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    actions = st.sampled_from(["pull", "push", "push", "bare", "add", "day", "shrink"])
    for action in draw(st.lists(actions, max_size=12)):
        keys = np.unique(np.array(draw(st.lists(KEYS, min_size=1, max_size=30)), np.int64))
        n = len(keys)
        rows = rng.normal(size=(n, tables[0].layout.num_weights)).astype(np.float32)
        shows = rng.integers(0, 4, n).astype(np.float32)
        clicks = np.minimum(shows, rng.integers(0, 2, n)).astype(np.float32)
        slots = rng.integers(0, 9, n).astype(np.uint32)
        results = []
        for table in tables:
            if action == "pull":
                results.append(table.pull(keys).tolist())
            elif action == "push":
                table.push(keys, rows, shows, clicks, slots)
            elif action == "bare":
                table.push(keys, rows)
            elif action == "add":
                table.add(keys, rows)
            elif action == "day":
                table.advance_day()
            else:
                results.append(table.shrink(threshold=0.2, max_unseen_days=1))
        if results:
            np.testing.assert_allclose(results[0], results[1], rtol=2e-5, atol=1e-6)
        assert tables[0].contains(keys).tolist() == tables[1].contains(keys).tolist()
        assert tables[0].num_rows == tables[1].num_rows <= (config.bounds and config.bounds.max_rows or 10**9)
        assert tables[0].num_rows == tables[1].num_rows
        assert tables[0].pull_counts == tables[1].pull_counts
    assert_same_rows(rows_of(tables[0]), rows_of(tables[1]))


@settings(max_examples=60, deadline=None)
@given(keys=st.lists(KEYS, max_size=200), dim=st.integers(1, 33))
def test_same_batches(keys: list[int], dim: int) -> None:
    """Distinct keys and merged gradients."""
    array = np.array(keys, np.int64)
    gradients = np.random.default_rng(0).normal(size=(len(keys), dim)).astype(np.float32)
    find = UniqueKeys()
    find(array[::-1].copy())  # an older generation must not be seen
    distinct, inverse = find(array)
    expected, places = reference_ids.unique_keys(array)
    assert distinct.tolist() == expected.tolist() == list(dict.fromkeys(keys))
    assert inverse.tolist() == places.tolist()
    merged = sum_rows(gradients, inverse, len(distinct))
    np.testing.assert_array_equal(merged, reference_ids.sum_rows(gradients, inverse, len(distinct)))
    for found, wanted in zip(sum_by_key(array, gradients), (distinct, merged, inverse), strict=True):
        np.testing.assert_array_equal(found, wanted)
