"""Rows on disk: the same table as in memory, within the memory it was given; a full disk is an error beforehand."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError, PSError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.disk_space import DiskSpace
from fleet.ps.table.entry import CountFilterEntry
from fleet.ps.table.initializers import Initializer
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable
from tests.fleet.ps._tables import rows_of

MEMORY = 12 << 20


def config(**given):
    given.setdefault("bounds", Bounds(rows="disk", memory_bytes=MEMORY))
    return SparseTableConfig("cold", 8, Rule("adagrad"), initializer=Initializer("normal", 0, 1), **given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bounds": Bounds(rows="disk", memory_bytes=12 << 20, max_rows=90_000)},
        {"bounds": Bounds(rows="disk", memory_bytes=12 << 20, max_rows=90_000, evict="lfu")},
        {"accessor": Accessor("CtrCommonAccessor"), "bounds": Bounds(rows="disk", memory_bytes=16 << 20)},
        {"entry": CountFilterEntry(2)},
    ],
    ids=["plain", "lru", "lfu", "ctr", "count"],
)
def test_a_table_on_disk_is_the_table_in_memory(tmp_path, given):
    cold = config(**given)
    bounds = cold.bounds
    # Ranks, and creation by push, as on disk: a limit that is never reached.
    twin = config(**{**given, "bounds": Bounds(max_rows=bounds.max_rows or 10**9, evict=bounds.evict)})
    tables = [SparseTable(cold, tmp_path), SparseTable(twin)]
    rng = np.random.default_rng(0)
    width = tables[0].layout.num_weights
    for step in range(18):
        keys = np.unique(np.concatenate((rng.integers(0, 120_000, 12_000), rng.zipf(1.2, 3000) % 9999))) * 7919
        gradients = rng.normal(size=(len(keys), width)).astype(np.float32)
        pulled = []
        for table in tables:
            pulled.append(table.pull(keys))
            table.push(keys, gradients)
            if step % 5 == 4:
                table.add(keys[:500], gradients[:500])
            if step % 8 == 7:
                table.advance_day()
                table.shrink(threshold=0.1, max_unseen_days=2)
        np.testing.assert_array_equal(*pulled)
        assert tables[0].memory_bytes <= cold.bounds.memory_bytes
        assert tables[0].num_rows == tables[1].num_rows
    store = tables[0]._memory
    hot = int(store._shards[:, 24].sum())
    assert 0 < hot < 0.9 * tables[0].num_rows  # or this test shows nothing
    assert rows_of(tables[0], 4000) == rows_of(tables[1], 4000)
    for table in tables:
        table.clear()
        assert table.num_rows == 0
        table.push(keys, gradients)
    np.testing.assert_array_equal(tables[0].pull(keys), tables[1].pull(keys))
    assert list(tmp_path.iterdir()) == []  # the file has no name
    for table in tables:
        table.close()


def test_keys_that_a_push_repeats_move_once(tmp_path):
    tables = [SparseTable(config(), tmp_path), SparseTable(config(bounds=Bounds(max_rows=10**9)))]
    keys = np.arange(100_000) * 7919
    for table in tables:
        table.push(keys, np.ones((len(keys), 8), np.float32))
        table.push(np.tile(keys[:300], 3), np.ones((900, 8), np.float32))
    np.testing.assert_array_equal(tables[0].pull(keys), tables[1].pull(keys))


def test_a_full_disk_is_refused_before_anything_changes(tmp_path, monkeypatch):
    table = SparseTable(config(), tmp_path)
    keys = np.arange(60_000) * 7919
    gradients = np.ones((len(keys), 8), np.float32)
    table.push(keys, gradients)
    before = rows_of(table, 4000)

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PSError, match=f"table 'cold': .*{tmp_path}: No space left on device.*as before"):
        table.push(np.arange(100_000) + 10**9, np.ones((100_000, 8), np.float32))
    assert rows_of(table, 4000) == before
    monkeypatch.undo()
    table.push(keys + 10**12, gradients)


def test_an_index_that_outgrows_its_half_is_refused(tmp_path):
    table = SparseTable(config(bounds=Bounds(rows="disk", memory_bytes=11 << 20)), tmp_path)
    table.push(np.arange(120_000), np.ones((120_000, 8), np.float32))
    with pytest.raises(PSError, match=r"the index of 120000 ids leaves no room for 50000 more.*memory_bytes"):
        table.push(np.arange(50_000) + 10**6, np.ones((50_000, 8), np.float32))
    assert table.num_rows == 120_000


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='rows="disk" needs a folder.*FLEET_PS_FOLDER'):
        SparseTable(config())
    with pytest.raises(ConfigError, match="memory_bytes is 1000; the index takes half of it.*64 pieces of 1024 rows"):
        SparseTable(config(bounds=Bounds(rows="disk", memory_bytes=1000)), tmp_path)
    with pytest.raises(ConfigError, match="36000000 bytes for max_rows=1000000"):
        SparseTable(config(bounds=Bounds(rows="disk", memory_bytes=2**24, max_rows=10**6)), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PSError, match="no space in .*file"):
        DiskSpace(Path(tmp_path / "file" / "x"), "cold")
