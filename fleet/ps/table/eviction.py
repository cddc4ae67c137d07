"""Which rows of a bounded table go: shares of its limit, and the choice by rank.

[Note: Eviction]
Each row of a table with a limit has a rank of 8 bytes, written with each push: the number of the change (of the
journal record, on a server), for "lfu" with the count of pushes above it. The rows of lowest rank go; among equal
ranks, those of the lowest mixed bits. So the choice depends on nothing but keys and ranks, and a replay
makes the same ones.

The limit is divided over groups of sub-shards, one group for a small table, 64 for a large one. A group above its
share goes down to 90 % of it, so that a scan of its ranks pays for many new rows and the table is never stopped as a
whole. A server writes the victims' keys to the journal (RecordKind.EVICT) before it deletes them, and a replay deletes
exactly these. It chooses none itself: a snapshot copies rows at different records, so that its rows are at no moment
those among which the server chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fleet.errors import ConfigError
from fleet.ps.table.hash import NUM_SUB_SHARDS, mix
from fleet.ps.table.layout import CHUNK_ROWS, Int64s, SparseTableConfig, part_bytes

_LEAST_SHARE = 4096
INDEX_BYTES = 36  # of a row, at most: 16 a place, filled to half after the index has grown, and places at the end
FIRST_TICK = 1 << 16  # ranks below are of rows that were loaded from a save, by their unseen days
COUNT_SHIFT, MOST_COUNTED = 48, 32767


@dataclass(frozen=True)
class Shares:
    """``groups`` of consecutive sub-shards with at most ``most`` rows each; an eviction keeps ``kept``."""

    groups: int
    most: int
    kept: int


def plan_shares(limit: int) -> Shares:
    """Returns how ``limit`` rows are divided.

    Example:
        >>> plan_shares(1000), plan_shares(10**6).groups
        (Shares(groups=1, most=1000, kept=900), 64)
    """
    groups = NUM_SUB_SHARDS
    while groups > 1 and limit // groups < _LEAST_SHARE:
        groups //= 2
    most = limit // groups
    return Shares(groups, most, most - most // 10)


def limit_of(config: SparseTableConfig) -> int | None:
    """Returns the most rows of a table on a server; ``None`` without a limit.

    Raises:
        ConfigError: ``max_bytes`` has no room for the first rows.
    """
    bounds = config.bounds
    if bounds is None or bounds.max_bytes is None:
        return None if bounds is None else bounds.max_rows
    waits = config.entry is not None and config.entry.to_attr().startswith("count_filter")
    row = sum(part_bytes(config))
    fixed = NUM_SUB_SHARDS * (CHUNK_ROWS * row + 64 * 1024 // NUM_SUB_SHARDS)
    limit = (bounds.max_bytes - fixed) // (row + INDEX_BYTES * (1 + waits))
    if limit < 1:
        raise ConfigError(
            f"table {config.name!r}: max_bytes is {bounds.max_bytes}; memory comes in {NUM_SUB_SHARDS} pieces of "
            f"{CHUNK_ROWS} rows, {row} bytes each, so a table takes at least {fixed + 1024 * 1024}. Set max_rows for "
            "a smaller one."
        )
    return limit


def oldest(keys: Int64s, ranks: Int64s, count: int) -> Int64s:
    """Returns the ``count`` keys of lowest rank, among equal ranks those of lowest mixed bits.

    Example:
        >>> sorted(oldest(np.array([7, 8, 9]), np.array([5, 1, 3]), 2).tolist())
        [8, 9]
    """
    if count >= len(keys):
        return keys
    bound = np.partition(ranks, count - 1)[count - 1]
    sure = ranks < bound
    ties = keys[ranks == bound]
    missing = count - int(np.count_nonzero(sure))
    if missing < len(ties):
        ties = ties[np.argpartition(mix(ties), missing - 1)[:missing]]
    return np.concatenate((keys[sure], ties))


def loaded_ranks(unseen_days: Int64s, counts: Int64s, *, counted: bool) -> Int64s:
    """Returns ranks for rows without one: below all later pushes, by unseen days; with ``counted``, by count first."""
    ranks: Int64s = FIRST_TICK - 1 - np.clip(unseen_days, 0, FIRST_TICK - 1)
    return ranks + (np.minimum(counts, MOST_COUNTED) << COUNT_SHIFT) if counted else ranks
