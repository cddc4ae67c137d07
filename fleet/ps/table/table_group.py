"""TableGroup: sparse tables of the same width, whose rows are pulled and pushed by one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fleet.ps.table.eviction import FIRST_TICK
from fleet.ps.table.kernels.numba_cache import address_of, load_kernels
from fleet.ps.table.layout import Float32s, Int64s
from fleet.ps.table.sparse_table import SparseTable


class TableGroup:
    """Tables whose keys and rows lie in one array each, one table behind the other.

    Each table keeps its own rule, rows, admission and limits; a call does as much as one for each table.

    Args:
        tables: with rows of the same number of columns; they must stay open.

    Example:
        >>> from fleet.ps import SparseTableConfig
        >>> group = TableGroup([SparseTable(SparseTableConfig(name, dim=8)) for name in ("user", "item")])
        >>> keys, ends = np.array([7, -3, 7], np.int64), np.array([2, 3])     # two of users, one of items
        >>> group.pull(keys, ends, np.empty((3, 8), np.float32)).shape
        (3, 8)
        >>> group.push(keys, ends, np.ones((3, 8), np.float32), tick=1)
    """

    def __init__(self, tables: Sequence[SparseTable]) -> None:
        self.tables = tuple(tables)
        self._addresses = np.array([table.address for table in tables], np.int64)
        self._on_disk = [(place, table) for place, table in enumerate(tables) if table.is_on_disk]
        self._requests = load_kernels("row_requests")
        self._finding = load_kernels("finding")

    def pull(self, keys: Int64s, ends: Int64s, out: Float32s, *, drawn: bool = True) -> Float32s:
        """Writes the rows of ``keys`` to ``out`` and returns it, see :meth:`SparseTable.pull`.

        Args:
            keys: int64 [n], contiguous.
            ends: int64 [tables], where the keys of each table end.
            out: float32 [n, columns], contiguous.
            drawn: ids without a row read as the weights that their rows will begin with, otherwise as zeros.
        """
        scratch = self._scratch(np.diff(ends, prepend=0))
        self._requests.pull_each(
            address_of(self._addresses),
            address_of(ends),
            len(self.tables),
            address_of(keys),
            address_of(out),
            int(drawn),
            address_of(scratch),
        )
        return out

    def push(
        self,
        keys: Int64s,
        ends: Int64s,
        gradients: Float32s,
        shows: Float32s | None = None,
        clicks: Float32s | None = None,
        slots: npt.NDArray[np.uint32] | None = None,
        *,
        tick: int,
    ) -> None:
        """Applies a gradient row per key, as change ``tick`` of every table, see :meth:`SparseTable.push`.

        The arrays are contiguous. The caller asks tables with limits for their victims then.
        """
        sizes = np.diff(ends, prepend=0)
        for place, table in self._on_disk:
            table.make_room(int(sizes[place]))
        scratch = self._scratch(sizes)
        failed = self._requests.push_each(
            address_of(self._addresses), address_of(ends), len(self.tables), address_of(keys), address_of(gradients),
            *map(address_of, (shows, clicks, slots)), tick, FIRST_TICK + tick, address_of(scratch),
        )  # fmt: skip
        if failed:
            self.tables[failed - 1].raise_full()
        for _, table in self._on_disk:
            table.cool()

    def _scratch(self, sizes: Int64s) -> Int64s:
        # Of the largest table's keys: the tables take turns with it.
        return np.empty(self._finding.scratch_words(int(sizes.max(initial=0))), np.int64)
