"""A sink in memory that behaves like Redis, and can be away, lose its answer, or go back to an older copy."""

from __future__ import annotations

import copy

import numpy as np

from fleet.ps.publishing.delta import Delta, check_position
from fleet.ps.table.partition import servers_of_keys

Rows = dict[str, dict[int, bytes]]


class MemorySink:
    """Keeps rows and positions; ``away`` fails before a delta is taken, ``deaf`` after."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.positions: dict[int, tuple[str, int]] = {}
        self.deltas: list[Delta] = []
        self.away = self.deaf = False

    def position(self, server: int) -> tuple[str, int] | None:
        if self.away:
            raise OSError("the sink is away")
        return self.positions.get(server)

    def write(self, delta: Delta) -> None:
        if self.away:
            raise OSError("the sink is away")
        check_position(delta, self.positions.get(delta.server))
        for rows in delta.tables:
            table = self.rows.setdefault(rows.table, {})
            assert not set(rows.keys.tolist()) & set(rows.deleted.tolist())
            assert len(set(rows.keys.tolist())) == len(rows.keys)
            if delta.whole:
                keys = np.array(list(table), np.int64)
                mine = servers_of_keys(keys, delta.num_servers, rows.routing) == delta.server
                for key in keys[mine].tolist():
                    del table[key]
            for key in rows.deleted.tolist():
                table.pop(key, None)
            for key, row in zip(rows.keys.tolist(), rows.values, strict=True):
                table[key] = row.tobytes()
        self.positions[delta.server] = (delta.history, delta.watermark)
        self.deltas.append(delta)
        if self.deaf:
            raise OSError("the answer was lost")

    def close(self) -> None:
        pass

    def copy(self) -> tuple[Rows, dict[int, tuple[str, int]]]:
        return copy.deepcopy((self.rows, self.positions))

    def restore(self, copied: tuple[Rows, dict[int, tuple[str, int]]]) -> None:
        self.rows, self.positions = copy.deepcopy(copied)
