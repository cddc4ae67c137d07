"""Which rows go: the choice depends on keys and ranks alone, shares add up to the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.ps.table.bounds import Bounds
from fleet.ps.table.eviction import limit_of, oldest, plan_shares
from fleet.ps.table.hash import mix_int
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable


@given(st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5), min_size=1), st.data())
def test_the_lowest_ranks_go_and_ties_by_mixed_bits(ranks: dict[int, int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(ranks)))
    order = data.draw(st.permutations(list(ranks)))
    found = oldest(np.array(order, np.int64), np.array([ranks[key] for key in order], np.int64), count)
    assert sorted(found.tolist()) == sorted(sorted(ranks, key=lambda key: (ranks[key], mix_int(key)))[:count])


@given(st.integers(1, 10**10))
def test_shares_keep_to_the_limit(limit: int) -> None:
    shares = plan_shares(limit)
    assert shares.groups * shares.most <= limit < shares.groups * (shares.most + 1)
    assert 1 <= shares.kept <= shares.most
    assert shares.groups == 1 or shares.most >= 4096


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_limit_in_bytes_holds(evict: str) -> None:
    limit = 24 << 20
    table = SparseTable(SparseTableConfig("t", 8, Rule("adagrad"), bounds=Bounds(max_bytes=limit, evict=evict)))
    rng = np.random.default_rng(0)
    for _ in range(40):
        keys = np.unique(rng.integers(0, 10**9, 10_000))
        table.push(keys, np.ones((len(keys), 8), np.float32))
        assert table.memory_bytes <= limit
    most = limit_of(table.config)
    assert most is not None
    assert 0.8 * most < table.num_rows <= most
    assert table.memory_bytes > 0.6 * limit


def test_loaded_rows_are_older_than_pushed_ones() -> None:
    source = SparseTable(SparseTableConfig("t", 2))
    source.push(np.arange(10), np.ones((10, 2), np.float32))
    source.advance_day()
    source.push(np.arange(5), np.ones((5, 2), np.float32))
    table = SparseTable(SparseTableConfig("t", 2, bounds=Bounds(max_rows=12)))
    for block in source.blocks():
        table.insert(block)
    table.push(np.arange(100, 105), np.ones((5, 2), np.float32))
    assert table.num_rows == 11  # 90 % of 12, and no less than that
    assert table.contains(np.arange(100, 105)).all()
    assert table.contains(np.arange(5)).all()
