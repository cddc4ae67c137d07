# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Kernels of bounded tables: list the ranks of a sub-shard's rows, delete rows by key."""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    EMPTY,
    GROUP,
    INDEX,
    LENGTH,
    LOW32,
    PENDING,
    PENDING_COUNT,
    SUB_SHARDS,
    SUB_WORDS,
    call_group,
    i64,
    kernel,
    lock_mutex,
    unlock_mutex,
    unmix,
    words,
)
from fleet.ps.table.kernels.finding import HASHES
from fleet.ps.table.kernels.row_kernels import find, rank_at
from fleet.ps.table.kernels.walks import erase_row


@kernel
def list_ranks(table, s, waiting, room, keys, ranks):
    """Writes keys and ranks of the rows of sub-shard ``s``; returns how many, or -1 if ``room`` is too small.

    With ``waiting``, those of ids that wait for admission, with their counts.
    """
    header = words(table)
    sub, n = header[SUB_SHARDS] + 8 * SUB_WORDS * s, i64(0)
    lock_mutex(sub)
    index = words(sub)[INDEX]
    for i in range(words(sub)[LENGTH]):
        h, low = words(index + 16 * i)[0], words(index + 16 * i)[1] & LOW32
        if low != EMPTY and (low & PENDING != 0) == (waiting != 0):
            if n == room:
                n = i64(-1)
                break
            words(keys)[n] = unmix(h)
            if waiting != 0:
                words(ranks)[n] = low & PENDING_COUNT
            else:
                words(ranks)[n] = words(rank_at(table, sub, low))[0]
            n += 1
    unlock_mutex(sub)
    return n


@kernel
def erase_keys(table, keys, n, scratch):
    """Deletes the rows of ``keys``, and what is known of those that wait for admission; returns how many there were."""
    header = words(table)
    call_group(header[GROUP], table, keys, n, scratch)
    bounds, hashes, erased = words(scratch), words(scratch + 8 * HASHES), 0
    for s in range(64):
        if bounds[s] != bounds[s + 1]:
            sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
            lock_mutex(sub)
            for i in range(bounds[s], bounds[s + 1]):
                at = find(sub, hashes[i])
                if at != 0:
                    erase_row(table, sub, at)
                    erased += 1
            unlock_mutex(sub)
    return erased
