# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Life kernels: the start and end of a table's memory."""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    CAPACITY,
    CHUNKS,
    FREE_SLOT,
    INDEX,
    LENGTH,
    NEXT_SLOT,
    NUM_ENTRIES,
    NUM_ROWS,
    NUM_SLABS,
    SLAB_AT,
    SLAB_BYTES,
    SLAB_LEFT,
    SLABS,
    SLABS_ROOM,
    SUB_SHARDS,
    SUB_WORDS,
    TABLE_LOCK,
    create_mutex,
    fill_bytes,
    i32,
    i64,
    kernel,
    lock_mutex,
    release,
    unlock_mutex,
    words,
)
from fleet.ps.table.kernels.index import grow

FIRST_CAPACITY = 32


@kernel
def open_table(table):
    """Creates the locks and empty indexes of a table whose header is filled in; returns 1 without memory."""
    header = words(table)
    create_mutex(table + 8 * TABLE_LOCK, 0)
    for s in range(64):
        sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
        create_mutex(sub, 0)
        if grow(sub, i64(FIRST_CAPACITY)):
            return 1
    return 0


@kernel
def close_table(table):
    """Releases all memory of a table; nobody may be using it."""
    header = words(table)
    for s in range(64):
        shard = words(header[SUB_SHARDS] + 8 * SUB_WORDS * s)
        if shard[INDEX] != 0:
            release(shard[INDEX])
        if shard[CHUNKS] != 0:
            release(shard[CHUNKS])
        for i in range(INDEX, FREE_SLOT + 1):
            shard[i] = 0
    for i in range(header[NUM_SLABS]):
        release(words(header[SLABS])[i])
    if header[SLABS] != 0:
        release(header[SLABS])
    header[SLAB_AT], header[SLAB_LEFT], header[SLAB_BYTES] = 0, 0, 0
    header[NUM_SLABS], header[SLABS], header[SLABS_ROOM] = 0, 0, 0


@kernel
def clear_table(table):
    """Removes every row; the memory is kept for new ones."""
    header = words(table)
    for s in range(64):
        sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
        shard = words(sub)
        lock_mutex(sub)
        fill_bytes(shard[INDEX], i32(0xFF), 16 * shard[LENGTH])
        shard[NUM_ENTRIES], shard[NUM_ROWS], shard[NEXT_SLOT], shard[FREE_SLOT] = 0, 0, 0, 0
        unlock_mutex(sub)


@kernel
def reserve_table(table, entries):
    """Makes room in each index for ``entries`` more keys than it has; returns 1 without memory.

    A save comes in the order of places. Into a small index such rows go one behind the other and make a single long
    probe; into one of the size they end up with they go where they belong.
    """
    header = words(table)
    for s in range(64):
        sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
        shard = words(sub)
        lock_mutex(sub)
        capacity = (shard[NUM_ENTRIES] + entries) * 3 // 2
        failed = capacity > shard[CAPACITY] and grow(sub, i64(capacity)) != 0
        unlock_mutex(sub)
        if failed:
            return 1
    return 0
