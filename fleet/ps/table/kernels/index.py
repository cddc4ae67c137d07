# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Index kernels: find, insert, erase and grow in one sub-shard; the caller holds its lock.

Open addressing with linear probing. Deletion shifts later entries back, so there are no tombstones. The last entry
of the array stays empty and ends every probe.
"""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    CAPACITY,
    EMPTY,
    INDEX,
    LENGTH,
    LOW32,
    NUM_ENTRIES,
    allocate,
    fill_bytes,
    i32,
    i64,
    part,
    place_of,
    release,
    words,
)


@part(i64(i64, i64))
def find(sub, h):
    """Returns the address of the entry with mixed bits ``h``, or 0."""
    shard = words(sub)
    at = shard[INDEX] + 16 * ((place_of(h) * shard[CAPACITY]) >> 32)
    while True:
        entry = words(at)
        if (entry[1] & LOW32) == EMPTY:
            return 0
        if entry[0] == h:
            return at
        at += 16


@part(i64(i64, i64, i64, i64, i64))
def place_entry(index, capacity, length, h, meta):
    """Writes an entry that is not there yet and returns its address, or 0 when it would run off the end."""
    at = index + 16 * ((place_of(h) * capacity) >> 32)
    end = index + 16 * (length - 1)
    while at < end:
        entry = words(at)
        if (entry[1] & LOW32) == EMPTY:
            entry[0] = h
            entry[1] = meta
            return at
        at += 16
    return 0


@part(i64(i64, i64))
def grow(sub, capacity):
    """Moves the index to ``capacity`` places or more; returns 0, or 1 without memory (the old index stays)."""
    shard = words(sub)
    while True:
        length = capacity + min(512, capacity // 8 + 16)
        fresh = allocate(16 * length)
        if fresh == 0:
            return 1
        fill_bytes(fresh, i32(0xFF), 16 * length)
        fits = True
        for i in range(shard[LENGTH]):
            entry = words(shard[INDEX] + 16 * i)
            if (entry[1] & LOW32) != EMPTY and place_entry(fresh, capacity, length, entry[0], entry[1]) == 0:
                fits = False
                break
        if fits:
            break
        release(fresh)
        capacity += capacity // 2
    if shard[INDEX] != 0:
        release(shard[INDEX])
    shard[INDEX], shard[CAPACITY], shard[LENGTH] = fresh, capacity, length
    return 0


@part(i64(i64, i64, i64))
def insert_entry(sub, h, meta):
    """Adds an entry that is not there yet, growing at three quarters; returns its address, 0 without memory."""
    shard = words(sub)
    if 4 * (shard[NUM_ENTRIES] + 1) > 3 * shard[CAPACITY] and grow(sub, shard[CAPACITY] + shard[CAPACITY] // 2):
        return 0
    at = place_entry(shard[INDEX], shard[CAPACITY], shard[LENGTH], h, meta)
    while at == 0:
        if grow(sub, shard[CAPACITY] + shard[CAPACITY] // 2):
            return 0
        at = place_entry(shard[INDEX], shard[CAPACITY], shard[LENGTH], h, meta)
    shard[NUM_ENTRIES] += 1
    return at
