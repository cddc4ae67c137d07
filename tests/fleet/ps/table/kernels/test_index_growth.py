"""The index grows as the foreseen steps say."""

from __future__ import annotations

import numpy as np

from fleet.ps import SparseTable, SparseTableConfig
from fleet.ps.table.kernels.common import CAPACITY, LENGTH, NUM_ENTRIES
from fleet.ps.table.kernels.index_growth import FIRST_CAPACITY, is_full, next_capacity, places_of
from tests.fleet.ps._tables import make_rows


def test_every_index_is_at_the_step_of_its_entries() -> None:
    table = SparseTable(SparseTableConfig("t", 1))
    shards = table._memory._shards  # type: ignore[union-attr]
    for start in range(0, 60_000, 3_000):
        make_rows(table, np.arange(start, start + 3_000) * 7919)
        for entries, capacity, length in shards[:, [NUM_ENTRIES, CAPACITY, LENGTH]].tolist():
            wanted = FIRST_CAPACITY
            while is_full(entries - 1, wanted):
                wanted = next_capacity(wanted)
            assert (capacity, length) == (wanted, places_of(wanted))
