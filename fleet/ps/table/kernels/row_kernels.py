# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Row kernels: a sub-shard's index, memory for rows, initial weights, and the admission of missing ids.

The caller holds the sub-shard's lock.

[Note: Index]
Open addressing with linear probing. Deletion shifts later entries back, so there are no tombstones. The last entry of
the array stays empty and ends every probe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from fleet.ps.table.hash import GOLDEN, MIX_2
from fleet.ps.table.kernels.common import (
    ADMISSION,
    ADMISSION_ARGUMENT,
    ADMIT_ARGUMENTS,
    BLOCK_WORDS,
    BLOCKS,
    CAPACITY,
    CHUNK_BYTES,
    CHUNK_ROWS,
    CHUNK_SHIFT,
    CHUNKS,
    CHUNKS_ROOM,
    COLD,
    COLD_LIMIT,
    COLUMN,
    CREATE_BY_SCORE,
    DAY,
    DISK_FILE,
    DISK_FROM,
    DISK_LEFT,
    DISK_NEXT,
    DISK_TO,
    DRAW,
    DRAW_ARGUMENTS,
    EMPTY,
    FIRST_SLAB,
    FLOATS,
    FREE_SLOT,
    HAS_EMBEDX,
    HAS_STATISTICS,
    HOT_CHUNKS,
    HOT_ROWS,
    IN_MEMORY,
    INDEX,
    INIT_A,
    INIT_B,
    INITIAL_STATE,
    LAST_SLAB,
    LENGTH,
    LINK,
    LOW32,
    MEMORY_CHUNKS,
    NEXT_SLOT,
    NUM_BLOCKS,
    NUM_CHUNKS,
    NUM_ENTRIES,
    NUM_ROWS,
    NUM_SLABS,
    NUM_WEIGHTS,
    ON_DISK,
    PENDING,
    PENDING_COUNT,
    RANK_STRIDE,
    RANKED,
    RANKS_AT,
    ROW_BYTES,
    ROW_STRIDE,
    SEED_BASE,
    SLAB_AT,
    SLAB_BYTES,
    SLAB_LEFT,
    SLABS,
    SLABS_ROOM,
    SLOT_END,
    SPARE_CHUNK,
    STATE,
    STATE_WIDTH,
    STATISTICS_AT,
    STATISTICS_BYTES,
    STATISTICS_STRIDE,
    TABLE_LOCK,
    TIER_WORDS,
    UNMAP_PAGES,
    UNRANKED,
    WHOLE_ROWS,
    WIDTH,
    ZERO_INIT,
    advise,
    allocate,
    boolean,
    c_function,
    call_draw,
    copy_bytes,
    doubles,
    f32,
    f64,
    fill_bytes,
    floats,
    i32,
    i64,
    lock_mutex,
    mix,
    none,
    part,
    place_of,
    read_file,
    release,
    u32,
    u64,
    uints,
    unlock_mutex,
    unmix,
    words,
    write_file,
)
from fleet.ps.table.kernels.index_growth import is_full, next_capacity, places_of

# -- index -------------------------------------------------------------------------------------------------------------

_places_of, _next_capacity = (part(i64(i64))(function) for function in (places_of, next_capacity))
_is_full = part(boolean(i64, i64))(is_full)


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
    while True:  # where the extra places are full it grows again
        length = _places_of(capacity)
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
        capacity = _next_capacity(capacity)
    if shard[INDEX] != 0:
        release(shard[INDEX])
    shard[INDEX], shard[CAPACITY], shard[LENGTH] = fresh, capacity, length
    return 0


@part(i64(i64, i64, i64))
def insert_entry(sub, h, meta):
    """Adds an entry that is not there yet, growing at three quarters; returns its address, 0 without memory."""
    shard = words(sub)
    if _is_full(shard[NUM_ENTRIES], shard[CAPACITY]) and grow(sub, _next_capacity(shard[CAPACITY])):
        return 0
    at = place_entry(shard[INDEX], shard[CAPACITY], shard[LENGTH], h, meta)
    while at == 0:
        if grow(sub, _next_capacity(shard[CAPACITY])):
            return 0
        at = place_entry(shard[INDEX], shard[CAPACITY], shard[LENGTH], h, meta)
    shard[NUM_ENTRIES] += 1
    return at


# -- initial weights ---------------------------------------------------------------------------------------------------


_TWO_PI = 2.0 * math.pi


@part(f64(i64, i64, i64, i64))
def uniform_of(numbers, key, column, draw):
    """Returns a number in [0, 1) from a hash of (seed, key, column, draw)."""
    base = mix(i64(u64(key) ^ u64(words(numbers)[SEED_BASE])))
    counter = u64(column + 1) * u64(GOLDEN) + u64(draw) * u64(MIX_2)
    return f64(i64(mix(i64(base + counter)) >> u64(11))) * 2.0**-53


def _constant(numbers, key, column):
    return doubles(numbers)[INIT_A]


def _uniform(numbers, key, column):
    a, b = doubles(numbers)[INIT_A], doubles(numbers)[INIT_B]
    return a + (b - a) * uniform_of(numbers, key, column, i64(0))


def _normal(numbers, key, column):
    u1 = uniform_of(numbers, key, column, i64(0))
    u2 = uniform_of(numbers, key, column, i64(1))
    value = math.sqrt(-2.0 * math.log(1.0 - u1)) * math.cos(_TWO_PI * u2)
    return doubles(numbers)[INIT_A] + doubles(numbers)[INIT_B] * value


def _truncated_normal(numbers, key, column):
    draw = i64(0)
    value = 3.0
    while abs(value) > 2.0:
        u1, u2 = uniform_of(numbers, key, column, draw), uniform_of(numbers, key, column, draw + 1)
        value = math.sqrt(-2.0 * math.log(1.0 - u1)) * math.cos(_TWO_PI * u2)
        draw += 2
    return doubles(numbers)[INIT_A] + doubles(numbers)[INIT_B] * value


_DRAWS: tuple[Callable[..., Any], ...] = (_constant, _uniform, _normal, _truncated_normal)


@functools.cache
def _compiled(kind: int) -> Any:
    return c_function(f64(*DRAW_ARGUMENTS))(_DRAWS[kind])


def draw_address(kind: int) -> int:
    """Returns the address of the compiled function of an initializer's kind."""
    return int(_compiled(kind).address)


# -- rows --------------------------------------------------------------------------------------------------------------


# What a find does with the ids it meets; COUNT is a push, ADD the same without the gate of create_by_score.
FIND_ONLY, COUNT, ADD = 0, 1, 2
# Columns that no weight has: admission and creation draw random numbers of their own.
_COLUMN_ADMISSION, _COLUMN_CREATION = -2, -3


@part(i64(i64, i64, i64))
def longer_list(old, used, room):
    """Returns the address of a list of ``room`` words with the ``used`` old ones, which are released; 0 if none."""
    fresh = allocate(8 * room)
    if fresh != 0 and old != 0:
        copy_bytes(fresh, old, 8 * used)
        release(old)
    return fresh


@part(i64(i64))
def new_chunk(table):
    """Returns the address of memory for 1024 rows, cut from the newest slab; 0 without memory."""
    header = words(table)
    size = header[CHUNK_BYTES]
    lock_mutex(table + 8 * TABLE_LOCK)
    # Slabs double up to LAST_SLAB: a small table takes little, a large one few allocations.
    if header[SLAB_LEFT] < size:
        num_bytes = min(max(2 * header[SLAB_BYTES], FIRST_SLAB), LAST_SLAB)
        num_bytes = max(num_bytes // size, 1) * size
        slab = allocate(num_bytes)
        if slab != 0 and header[NUM_SLABS] == header[SLABS_ROOM]:
            room = 2 * header[SLABS_ROOM] + 16
            slabs = longer_list(header[SLABS], header[NUM_SLABS], room)
            if slabs == 0:
                release(slab)
                slab = 0
            else:
                header[SLABS], header[SLABS_ROOM] = slabs, room
        if slab == 0:
            unlock_mutex(table + 8 * TABLE_LOCK)
            return 0
        words(header[SLABS])[header[NUM_SLABS]] = slab
        header[NUM_SLABS] += 1
        header[SLAB_AT], header[SLAB_LEFT], header[SLAB_BYTES] = slab, num_bytes, num_bytes
    chunk = header[SLAB_AT]
    header[SLAB_AT] += size
    header[SLAB_LEFT] -= size
    unlock_mutex(table + 8 * TABLE_LOCK)
    return chunk


@part(i64(i64, i64, i64))
def row_at(table, sub, slot):
    """Returns the address of a slot's row."""
    chunk = words(words(sub)[CHUNKS])[slot >> CHUNK_SHIFT]
    return chunk + (slot & (CHUNK_ROWS - 1)) * words(table)[ROW_STRIDE]


@part(i64(i64, i64, i64))
def statistics_at(table, sub, slot):
    """Returns the address of a slot's statistics: float64 show and click, float32 delta score, uint32 slot."""
    chunk = words(words(sub)[CHUNKS])[slot >> CHUNK_SHIFT]
    return chunk + words(table)[STATISTICS_AT] + (slot & (CHUNK_ROWS - 1)) * words(table)[STATISTICS_STRIDE]


@part(i64(i64, i64, i64))
def rank_at(table, sub, slot):
    """Returns the address of a slot's rank."""
    chunk = words(words(sub)[CHUNKS])[slot >> CHUNK_SHIFT]
    return chunk + words(table)[RANKS_AT] + (slot & (CHUNK_ROWS - 1)) * words(table)[RANK_STRIDE]


@part(boolean(i64, i64, i64))
def is_cold(table, sub, slot):
    """Returns whether the slot is on disk."""
    header = words(table)
    return header[DISK_FROM] <= words(words(sub)[CHUNKS])[slot >> CHUNK_SHIFT] < header[DISK_TO]


@part(none(i64))
def use_cold(table):
    """Counts a row on disk that is about to be used, and now and then takes all pages out of this process.

    They stay in the page cache as long as the system has room for them.
    """
    header = words(table)
    header[COLD] += 1
    if header[COLD] >= header[COLD_LIMIT]:
        header[COLD] = 0
        advise(header[DISK_FROM], header[DISK_NEXT] - header[DISK_FROM], i32(UNMAP_PAGES))


@part(none(i64, i64, i64, i64))
def read_cold(table, address, target, num_bytes):
    """Copies from the file of rows on disk, without a mapped page where the system can."""
    header = words(table)
    if read_file(i32(header[DISK_FILE]), target, num_bytes, address - header[DISK_FROM]) != num_bytes:
        use_cold(table)
        copy_bytes(target, address, num_bytes)


@part(none(i64, i64, i64, i64))
def write_cold(table, address, source, num_bytes):
    """Copies to the file of rows on disk, without a mapped page where the system can."""
    header = words(table)
    if write_file(i32(header[DISK_FILE]), source, num_bytes, address - header[DISK_FROM]) != num_bytes:
        use_cold(table)
        copy_bytes(address, source, num_bytes)


@part(i64(i64, i64, i64, i64))
def link_of(table, sub, slot, tier):
    """Returns the link that :func:`set_link` wrote to a free slot."""
    if tier == IN_MEMORY:
        return i64(uints(row_at(table, sub, slot))[0])
    words(sub)[LINK] = 0
    read_cold(table, row_at(table, sub, slot), sub + 8 * LINK, 4)
    return words(sub)[LINK]


@part(none(i64, i64, i64, i64, i64))
def set_link(table, sub, slot, tier, link):
    """Writes the next free slot to a free slot."""
    words(sub)[LINK] = link
    if tier == IN_MEMORY:
        uints(row_at(table, sub, slot))[0] = u32(link)
    else:
        write_cold(table, row_at(table, sub, slot), sub + 8 * LINK, 4)


@part(i64(i64))
def new_disk_chunk(table):
    """Returns the address of mapped disk space for 1024 rows; 0 if nobody has allocated it."""
    header = words(table)
    chunk = i64(0)
    lock_mutex(table + 8 * TABLE_LOCK)
    if header[DISK_LEFT] >= header[CHUNK_BYTES]:
        chunk = header[DISK_NEXT]
        header[DISK_NEXT] += header[CHUNK_BYTES]
        header[DISK_LEFT] -= header[CHUNK_BYTES]
    unlock_mutex(table + 8 * TABLE_LOCK)
    return chunk


@part(i64(i64, i64, i64))
def add_chunk(table, sub, tier):
    """Returns the first slot of a new chunk in a tier, or -1 without memory."""
    header, shard = words(table), words(sub)
    if tier == IN_MEMORY and header[MEMORY_CHUNKS] != 0 and shard[HOT_CHUNKS] >= header[MEMORY_CHUNKS]:
        return -1
    if shard[NUM_CHUNKS] == shard[CHUNKS_ROOM]:
        room = 2 * shard[CHUNKS_ROOM] + 4
        chunks = longer_list(shard[CHUNKS], shard[NUM_CHUNKS], room)
        if chunks == 0:
            return -1
        shard[CHUNKS], shard[CHUNKS_ROOM] = chunks, room
    chunk = new_chunk(table) if tier == IN_MEMORY else new_disk_chunk(table)
    if chunk == 0:
        return -1
    words(shard[CHUNKS])[shard[NUM_CHUNKS]] = chunk
    shard[NUM_CHUNKS] += 1
    shard[HOT_CHUNKS] += tier == IN_MEMORY
    return (shard[NUM_CHUNKS] - 1) * CHUNK_ROWS


@part(i64(i64, i64, i64))
def new_slot(table, sub, tier):
    """Returns a free slot of a tier, or -1 without memory."""
    shard, place = words(sub), words(sub + 8 * TIER_WORDS * tier)
    if place[FREE_SLOT] != 0:
        slot = place[FREE_SLOT] - 1
        place[FREE_SLOT] = link_of(table, sub, slot, tier)
    else:
        if place[NEXT_SLOT] == place[SLOT_END]:
            first = place[SPARE_CHUNK] - 1
            if first >= 0:
                place[SPARE_CHUNK] = link_of(table, sub, first, tier)
            else:
                first = add_chunk(table, sub, tier)
            if first < 0:
                return -1
            place[NEXT_SLOT], place[SLOT_END] = first, first + CHUNK_ROWS
        slot = place[NEXT_SLOT]
        place[NEXT_SLOT] += 1
    shard[NUM_ROWS] += 1
    shard[HOT_ROWS] += tier == IN_MEMORY
    return slot


@part(i64(i64, i64))
def any_slot(table, sub):
    """Returns a free slot, in memory if it has room, or -1."""
    slot = new_slot(table, sub, i64(IN_MEMORY))
    if slot < 0 and words(table)[DISK_FROM] != 0:
        slot = new_slot(table, sub, i64(ON_DISK))
    return slot


@part(none(i64, i64, i64))
def free_slot(table, sub, slot):
    """Gives the slot back."""
    shard = words(sub)
    tier = i64(ON_DISK) if is_cold(table, sub, slot) else i64(IN_MEMORY)
    place = words(sub + 8 * TIER_WORDS * tier)
    set_link(table, sub, slot, tier, place[FREE_SLOT])
    place[FREE_SLOT] = slot + 1
    shard[NUM_ROWS] -= 1
    shard[HOT_ROWS] -= tier == IN_MEMORY


@part(none(i64, i64, i64, i64))
def move_row(table, sub, at, slot):
    """Moves the row of the entry at address ``at``, its statistics and rank behind it, to a slot of the other tier."""
    entry, size = words(at), words(table)[ROW_STRIDE]
    old = entry[1] & LOW32
    if is_cold(table, sub, old):
        read_cold(table, row_at(table, sub, old), row_at(table, sub, slot), size)
    else:
        write_cold(table, row_at(table, sub, slot), row_at(table, sub, old), size)
    entry[1] = (entry[1] & ~LOW32) | slot
    free_slot(table, sub, old)


@part(boolean(i64, i64, f64, i64))
def may_start(table, h, score, nonce):
    """Returns whether a missing id may get an entry at all."""
    header = words(table)
    if header[ADMISSION] == 2:
        drawn = uniform_of(header[FLOATS], unmix(h), i64(_COLUMN_ADMISSION), i64(0))
        if not drawn * 4294967296.0 < header[ADMISSION_ARGUMENT]:
            return False
    if header[CREATE_BY_SCORE] == 0 or score >= 1.0:
        return True
    return score > uniform_of(header[FLOATS], unmix(h), i64(_COLUMN_CREATION), nonce)


@part(none(i64, i64, i64))
def draw_weights(table, h, target):
    """Writes the weights that a new row would have."""
    header, weights, key = words(table), floats(target), unmix(h)
    for column in range(header[NUM_WEIGHTS]):
        weights[column] = f32(0)
    if not may_start(table, h, 1.0, i64(0)):
        return
    for block in range(header[NUM_BLOCKS] if header[WHOLE_ROWS] != 0 else 1):
        place = words(table + 8 * (BLOCKS + BLOCK_WORDS * block))
        if header[ZERO_INIT] == 0 or block != 0:
            for column in range(place[COLUMN], place[COLUMN] + place[WIDTH]):
                weights[column] = f32(call_draw(header[DRAW], header[FLOATS], key, column))


@part(none(i64, i64, i64))
def initialise_state(table, row, block):
    """Writes the initial state of one block of a row."""
    place, values = words(table + 8 * (BLOCKS + BLOCK_WORDS * block)), floats(row)
    start = doubles(words(table)[FLOATS])[INITIAL_STATE + block]
    for i in range(place[STATE], place[STATE] + place[STATE_WIDTH]):
        values[i] = f32(start)


@part(none(i64, i64, i64, i64))
def initialise_block(table, row, h, block):
    """Writes the initial weights and state of one block of a row."""
    header, place = words(table), words(table + 8 * (BLOCKS + BLOCK_WORDS * block))
    weights, key = floats(row), unmix(h)
    zero = header[ZERO_INIT] != 0 and block == 0
    for column in range(place[COLUMN], place[COLUMN] + place[WIDTH]):
        weights[column] = f32(0) if zero else f32(call_draw(header[DRAW], header[FLOATS], key, column))
    initialise_state(table, row, block)


@part(i64(i64, i64, i64))
def new_row(table, sub, h):
    """Returns the slot of a fresh row, initialised; -1 without memory."""
    slot = any_slot(table, sub)
    if slot < 0:
        return -1
    if is_cold(table, sub, slot):
        use_cold(table)
    header, row = words(table), row_at(table, sub, slot)
    fill_bytes(row, i32(0), header[ROW_BYTES])
    initialise_block(table, row, h, i64(0))
    if header[NUM_BLOCKS] == 2 and header[WHOLE_ROWS] != 0:
        initialise_block(table, row, h, i64(1))
    if header[HAS_STATISTICS] != 0:
        fill_bytes(statistics_at(table, sub, slot), i32(0), STATISTICS_BYTES)
    if header[RANKED] != UNRANKED:
        words(rank_at(table, sub, slot))[0] = 0
    return slot


@part(i64(i64, i64, i64, boolean))
def meta_of(table, slot, count, has_embedx):
    """Returns the second word of an entry seen today."""
    meta = slot | ((words(table)[DAY] & 0xFFFF) << 32) | (min(count, 32767) << 48)
    return meta | i64(-(2**63)) if has_embedx else meta


@c_function(i64(*ADMIT_ARGUMENTS))
def admit(table, sub, h, at, mode, score, nonce):
    """Gives a pushed id its entry (``at`` 0), or counts a push on an id not admitted yet, and the row if admitted.

    Returns the slot, -1 for none, -2 without memory.
    """
    header = words(table)
    count = i64(1)
    if at == 0 and not may_start(table, h, score if mode == COUNT else 1.0, nonce):
        return i64(-1)
    if at != 0:
        count += words(at)[1] & PENDING_COUNT
    if header[ADMISSION] == 1 and count < header[ADMISSION_ARGUMENT]:
        meta = meta_of(table, PENDING | count, i64(0), False)
        if at == 0:
            return i64(-1) if insert_entry(sub, h, meta) != 0 else i64(-2)
        words(at)[1] = meta
        return i64(-1)
    slot = new_row(table, sub, h)
    if slot < 0:
        return i64(-2)
    meta = meta_of(table, slot, count, header[WHOLE_ROWS] != 0)
    if at != 0:
        words(at)[1] = meta
    elif insert_entry(sub, h, meta) == 0:
        return i64(-2)
    return slot | HAS_EMBEDX if header[WHOLE_ROWS] != 0 else slot
