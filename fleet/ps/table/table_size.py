"""TableSize: what a table of so many ids takes on a server, foreseen by the rules that its memory follows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from fleet.ps.table.disk_space import plan_memory
from fleet.ps.table.eviction import limit_of
from fleet.ps.table.hash import NUM_SUB_SHARDS
from fleet.ps.table.kernels.index_growth import FIRST_CAPACITY, is_full, next_capacity, places_of
from fleet.ps.table.layout import CHUNK_ROWS, SparseTableConfig, part_bytes

_PLACE_BYTES = 16


@dataclass(frozen=True)
class TableSize:
    """Bytes of one table on one server.

    Attributes:
        rows: how many rows it holds, within its limit.
        waiting: ids that wait for their row.
        row_bytes: bytes of the rows in memory.
        index_bytes: bytes of the index.
        disk_bytes: bytes of the rows on disk.
    """

    rows: int
    waiting: int
    row_bytes: int
    index_bytes: int
    disk_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows and index in memory, as ``fleet_ps_table_bytes`` shows them."""
        return self.row_bytes + self.index_bytes


def size_of(config: SparseTableConfig, rows: int, waiting: int = 0) -> TableSize:
    """Returns the size of a table of so many ids; within its limit.

    Args:
        config: of the table.
        rows: ids that have a row.
        waiting: ids that an entry policy still holds back.

    Raises:
        ConfigError: the limits of the table do not fit its rows.

    Example:
        >>> size_of(SparseTableConfig("ads", 16), 1_000_000).memory_bytes // 1_000_000
        158
    """
    limit = limit_of(config)
    if limit is not None:
        rows, waiting = min(rows, limit), min(waiting, limit)
    chunk_bytes = CHUNK_ROWS * sum(part_bytes(config))
    chunks = sum(-(-share // CHUNK_ROWS) for share in _shares(rows))
    hot = chunks
    if config.bounds is not None and config.bounds.rows == "disk":
        hot = min(chunks, NUM_SUB_SHARDS * plan_memory(config, chunk_bytes).hot_chunks)
    index = sum(_index_bytes(share) for share in _shares(rows + waiting))
    return TableSize(rows, waiting, hot * chunk_bytes, index, (chunks - hot) * chunk_bytes)


def _shares(ids: int) -> list[int]:
    """Returns how many of so many ids each sub-shard gets: a hash deals them, so the shares spread as a count does."""
    if ids < NUM_SUB_SHARDS:
        return [1] * ids + [0] * (NUM_SUB_SHARDS - ids)
    mean = ids / NUM_SUB_SHARDS
    spread = NormalDist(mean, mean**0.5)
    return [max(0, round(spread.inv_cdf((s + 0.5) / NUM_SUB_SHARDS))) for s in range(NUM_SUB_SHARDS)]


def _index_bytes(ids: int) -> int:
    capacity = FIRST_CAPACITY
    while is_full(ids - 1, capacity):
        capacity = next_capacity(capacity)
    return _PLACE_BYTES * int(places_of(capacity))
