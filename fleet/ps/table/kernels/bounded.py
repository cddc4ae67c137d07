# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Kernels of bounded tables: list the ranks of a sub-shard's rows, delete rows by key."""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    DISK_LEFT,
    EMPTY,
    GROUP,
    INDEX,
    LENGTH,
    LOW32,
    ON_DISK,
    PENDING,
    PENDING_COUNT,
    SUB_SHARDS,
    SUB_WORDS,
    TABLE_LOCK,
    call_group,
    i64,
    kernel,
    lock_mutex,
    unlock_mutex,
    unmix,
    words,
)
from fleet.ps.table.kernels.finding import HASHES
from fleet.ps.table.kernels.row_kernels import find, is_cold, move_row, new_slot, rank_at, use_cold
from fleet.ps.table.kernels.walks import erase_row


@kernel
def list_ranks(table, s, waiting, room, keys, ranks):
    """Writes keys and ranks of the rows of sub-shard ``s``; returns how many, or -1 if ``room`` is too small.

    ``waiting`` 1 lists the ids that wait for admission, with their counts; 2 lists the rows in memory alone.
    """
    header = words(table)
    sub, n = header[SUB_SHARDS] + 8 * SUB_WORDS * s, i64(0)
    lock_mutex(sub)
    index = words(sub)[INDEX]
    for i in range(words(sub)[LENGTH]):
        h, low = words(index + 16 * i)[0], words(index + 16 * i)[1] & LOW32
        if low != EMPTY and (low & PENDING != 0) == (waiting == 1):
            cold = waiting != 1 and is_cold(table, sub, low)
            if cold and waiting == 2:
                continue
            if cold:
                use_cold(table)
            if n == room:
                n = i64(-1)
                break
            words(keys)[n] = unmix(h)
            if waiting == 1:
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


@kernel
def cool_keys(table, keys, n, scratch):
    """Moves the rows of ``keys`` from memory to disk, as far as that has room; returns how many moved."""
    header = words(table)
    call_group(header[GROUP], table, keys, n, scratch)
    bounds, hashes, moved = words(scratch), words(scratch + 8 * HASHES), 0
    for s in range(64):
        if bounds[s] != bounds[s + 1]:
            sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
            lock_mutex(sub)
            for i in range(bounds[s], bounds[s + 1]):
                at = find(sub, hashes[i])
                if at != 0 and words(at)[1] & PENDING == 0 and not is_cold(table, sub, words(at)[1] & LOW32):
                    slot = new_slot(table, sub, i64(ON_DISK))
                    if slot >= 0:
                        move_row(table, sub, at, slot)
                        moved += 1
            unlock_mutex(sub)
    return moved


@kernel
def add_space(table, num_bytes):
    """Notes that so many more bytes of the mapping are allocated."""
    lock_mutex(table + 8 * TABLE_LOCK)
    words(table)[DISK_LEFT] += num_bytes
    unlock_mutex(table + 8 * TABLE_LOCK)
