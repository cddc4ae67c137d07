"""A group of tables does at once what each table does alone, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps import Accessor, Initializer, Rule, SparseTable, SparseTableConfig
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.table_group import TableGroup

KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"rule": Rule("sgd")}, {"rule": Rule("adam"), "initializer": Initializer("normal", 0.0, 0.1)}],
    "counted": [{"accessor": Accessor(embedx_threshold=2)}, {"accessor": Accessor(), "rule": Rule("adagrad")}],
    "bounded": [{"bounds": Bounds(max_rows=5000)}, {"bounds": Bounds(max_rows=4500, evict="lfu")}, {}],
}


def tables_of(kind: str) -> list[SparseTable]:
    return [
        SparseTable(SparseTableConfig(f"{kind}{number}", 4, **{"rule": Rule("adagrad"), **more}))
        for number, more in enumerate(KINDS[kind])
    ]


def rows_in(table: SparseTable) -> dict[int, bytes]:
    return {
        key: row.tobytes()
        for block in table.blocks()
        for key, row in zip(block.keys.tolist(), block.values, strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_does_what_its_tables_do(kind: str) -> None:
    rng = np.random.default_rng(0)
    alone, together = tables_of(kind), tables_of(kind)
    group = TableGroup(together)
    width, columns = together[0].layout.num_weights, together[0].config.dim
    for tick in range(1, 12):
        keys = [rng.choice(9000, int(n), replace=False).astype(np.int64) for n in rng.integers(0, 1500, len(alone))]
        ends = np.cumsum([len(some) for some in keys])
        joined = np.concatenate(keys)
        drawn = bool(tick % 2)
        rows = group.pull(joined, ends, np.empty((len(joined), columns), np.float32), drawn=drawn)
        gradients = rng.standard_normal((len(joined), width), np.float32)
        shows = rng.integers(1, 4, len(joined)).astype(np.float32) if kind == "counted" else None
        clicks = None if shows is None else (shows > 2).astype(np.float32)
        slots = None if shows is None else rng.integers(0, 9, len(joined)).astype(np.uint32)
        group.push(joined, ends, gradients, shows, clicks, slots, tick=tick)
        start = 0
        for one, twin, some in zip(alone, together, keys, strict=True):
            own = slice(start, start + len(some))
            start += len(some)
            np.testing.assert_array_equal(one.pull(some, create=drawn), rows[own])
            given = (None if array is None else array[own] for array in (shows, clicks, slots))
            one.push(some, gradients[own], *given, tick=tick)
            assert sorted(one.evict().tolist()) == sorted(twin.evict().tolist())
    for one, twin in zip(alone, together, strict=True):
        assert rows_in(twin) == rows_in(one)
        assert one.pull_counts == twin.pull_counts


def test_rows_on_disk_are_moved_there_as_by_one_table(tmp_path: Any) -> None:
    bounds = Bounds(rows="disk", memory_bytes=64 << 20)
    config = SparseTableConfig("cold", 64, Rule("sgd", {"learning_rate": 1.0}), bounds=bounds)
    tables = [SparseTable(config, tmp_path / "one"), SparseTable(SparseTableConfig("warm", 64, config.rule))]
    group = TableGroup(tables)
    keys = np.arange(260_000, dtype=np.int64)
    ends = np.array([250_000, 260_000])
    before = group.pull(keys, ends, np.empty((260_000, 64), np.float32))
    for tick in (1, 2, 3):
        group.push(keys, ends, np.ones((260_000, 64), np.float32), tick=tick)
    after = group.pull(keys, ends, np.empty((260_000, 64), np.float32))
    assert tables[0].disk_bytes > 0
    np.testing.assert_allclose(after[250_000:], before[250_000:] - 3, rtol=1e-5)
    np.testing.assert_allclose(after[:250_000], before[:250_000] - 3, rtol=1e-5)


def test_the_table_without_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of("plain")
    group = TableGroup(tables)
    monkeypatch.setattr(group._requests, "push_each", lambda *arguments: 2)
    with pytest.raises(PSError, match="'plain1': out of memory"):
        group.push(np.arange(3), np.array([1, 2, 3]), np.zeros((3, 4), np.float32), tick=1)
