"""The foreseen size of a table is that of a table with so many rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps import Accessor, CountFilterEntry, Rule, SparseTable, SparseTableConfig
from fleet.ps.table.bounds import Bounds
from fleet.ps.table.table_size import size_of
from tests.fleet.ps._tables import make_rows

CONFIGS = {
    "sgd": SparseTableConfig("t", 4, Rule("sgd")),
    "adagrad": SparseTableConfig("t", 16, Rule("adagrad")),
    "adam": SparseTableConfig("t", 9, Rule("adam"), accessor=Accessor("CtrCommonAccessor")),
    "lru": SparseTableConfig("t", 16, Rule("rowwise_adagrad"), bounds=Bounds(max_rows=10**7)),
}


@pytest.mark.parametrize("rows", [5_000, 120_000, 300_000, 1_000_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_of_rows_in_memory(name: str, rows: int) -> None:
    """Within 5 %: sub-shards do not all grow at the same row."""
    table = SparseTable(CONFIGS[name])
    make_rows(table, np.arange(rows) * 7919)
    assert size_of(CONFIGS[name], rows).memory_bytes == pytest.approx(table.memory_bytes, rel=0.05)
    table.close()


def test_of_ids_that_wait() -> None:
    config = SparseTableConfig("t", 16, Rule("adam"), entry=CountFilterEntry(3))
    table = SparseTable(config)
    for ids in (range(500_000), range(100_000), range(100_000)):
        make_rows(table, ids)
    assert size_of(config, 100_000, 400_000).memory_bytes == pytest.approx(table.memory_bytes, rel=0.05)
    table.close()


def test_a_limit_holds_rows_and_bytes() -> None:
    for bounds in (Bounds(max_rows=70_000), Bounds(max_bytes=40_000_000)):
        config = SparseTableConfig("t", 16, Rule("adagrad"), bounds=bounds)
        size = size_of(config, 10**9)
        assert size.memory_bytes <= (bounds.max_bytes or 20_000_000)
        table = SparseTable(config)
        for start in range(0, 400_000, 10_000):
            make_rows(table, np.arange(start, start + 10_000))
        assert 0.9 * size.rows <= table.num_rows <= size.rows
        assert size.memory_bytes == pytest.approx(table.memory_bytes, rel=0.2)
        table.close()


def test_of_rows_on_disk(tmp_path: Path) -> None:
    config = SparseTableConfig("t", 63, Rule("sgd"), bounds=Bounds(rows="disk", memory_bytes=64 << 20))
    table = SparseTable(config, tmp_path)
    for start in range(0, 440_000, 20_000):
        make_rows(table, range(start, start + 20_000))
    size = size_of(config, 440_000)
    assert size.disk_bytes > 0
    assert size.memory_bytes <= 64 << 20
    assert size.memory_bytes == pytest.approx(table.memory_bytes, rel=0.1)
    assert size.disk_bytes + size.row_bytes == pytest.approx(440_000 * (256 + 8), rel=0.1)
    table.close()


def test_limits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes is 1000"):
        size_of(SparseTableConfig("t", 16, bounds=Bounds(max_bytes=1000)), 10)
