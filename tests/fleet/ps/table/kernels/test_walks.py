"""The kernels of bounded tables: ranks are listed as they were written, rows deleted by key are gone."""

from __future__ import annotations

import numpy as np

from fleet.ps.table.bounds import Bounds
from fleet.ps.table.entry import CountFilterEntry
from fleet.ps.table.eviction import FIRST_TICK
from fleet.ps.table.kernels import walks
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable

ONES = np.ones((100, 2), np.float32)


def table_of(**given):
    return SparseTable(SparseTableConfig("t", 2, Rule("sgd"), **given))


def test_ranks_are_the_pushes_and_their_counts() -> None:
    for evict, counted in (("lru", 0), ("lfu", 1)):
        table = table_of(bounds=Bounds(max_rows=1000, evict=evict))
        keys = np.arange(100)
        table.push(keys, ONES)
        table.push(keys[:30], ONES[:30])
        table.add(keys[:10], ONES[:10])
        found = dict(zip(*(part.tolist() for part in table._memory._list_ranks(range(64), 0)), strict=True))
        expected = {key: 1 + (key < 30) + (key < 10) for key in range(100)}
        assert found == {key: (counted * n << 48) + FIRST_TICK + n for key, n in expected.items()}


def test_too_little_room_changes_nothing() -> None:
    table = table_of(bounds=Bounds(max_rows=1000))
    table.push(np.arange(100), ONES)
    assert walks.list_ranks(table._memory.address, 0, 0, 0, 0, 0) in (-1, 0)
    keys, _ = table._memory._list_ranks(range(64), 0)
    assert sorted(keys.tolist()) == list(range(100))


def test_ids_that_wait_are_listed_apart() -> None:
    table = table_of(bounds=Bounds(max_rows=1000), entry=CountFilterEntry(3))
    for n in (100, 50, 20):
        table.push(np.arange(n), ONES[:n])
    assert len(table._memory._list_ranks(range(64), 0)[0]) == table.num_rows == 20
    keys, counts = table._memory._list_ranks(range(64), 1)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {key: 1 + (key < 50) for key in range(20, 100)}


def test_rows_are_erased_by_key() -> None:
    table = table_of(bounds=Bounds(max_rows=1000))
    table.push(np.arange(100), ONES)
    told = []
    table.on_delete = told.append
    assert table.erase(np.array([3, 4, 777])) == 2
    assert table.num_rows == 98
    assert not table.contains(np.array([3, 4])).any()
    assert np.concatenate(told).tolist() == [3, 4, 777]
    table.push(np.arange(100), ONES)
    assert table.num_rows == 100
