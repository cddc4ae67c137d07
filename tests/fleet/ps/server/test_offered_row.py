"""Dense tables whose values workers read where they lie: what changes there, and when (L.1)."""

from __future__ import annotations

import numpy as np

from fleet.ps.server.offered_row import OfferedRow, TableReader
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.rules import Rule


def test_a_table_changes_in_place_only_by_a_step_that_all_readers_wait_for() -> None:
    table = DenseTable(DenseTableConfig("mlp", 3, Rule("sgd", {"learning_rate": 1.0})))
    one = np.ones(3, np.float32)
    first, second = TableReader(), TableReader()
    found: list[OfferedRow] = []

    def offer(reader: TableReader) -> OfferedRow:
        table.lie_in(OfferedRow, lambda memory: (memory.readers.add(reader), found.append(memory)))
        return found[-1]

    memory = offer(first)
    assert offer(second) is memory
    first.waits_for = second.waits_for = 1
    table.push(-one, 1)
    assert memory.row.tolist() == [1.0] * 3
    assert table.memory is memory
    first.waits_for = 2  # the second one computes, was silent for too long, or stands at a barrier
    table.push(-one, 2)
    assert table.memory is None
    assert memory.row.tolist() == [1.0] * 3
    assert table.pull().tolist() == [2.0] * 3
    for change in (
        lambda: table.push(-one),
        lambda: table.set_values(5 * one),
        lambda: table.add(one),
        lambda: table.set_state(one, np.empty(0, np.float32)),
    ):
        memory = offer(first)
        before = memory.row.tolist()
        change()  # for which no reader waits
        assert table.memory is None
        assert memory.row.tolist() == before
    assert int(memory._count[0]) % 2 == 0
