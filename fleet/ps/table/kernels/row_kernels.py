# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Row kernels: memory for rows, initial values, and finding or creating the rows of a batch.

The caller holds the sub-shard's lock.
"""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    ADMISSION,
    ADMISSION_ARGUMENT,
    ADMIT_ARGUMENTS,
    BLOCK_WORDS,
    BLOCKS,
    CHUNK_BYTES,
    CHUNK_ROWS,
    CHUNK_SHIFT,
    CHUNKS,
    CHUNKS_ROOM,
    COLUMN,
    CREATE_BY_SCORE,
    DAY,
    DRAW,
    FIRST_SLAB,
    FLOATS,
    FREE_SLOT,
    HAS_EMBEDX,
    HAS_STATISTICS,
    INITIAL_STATE,
    LAST_SLAB,
    NEXT_SLOT,
    NUM_BLOCKS,
    NUM_CHUNKS,
    NUM_ROWS,
    NUM_SLABS,
    PENDING,
    PENDING_COUNT,
    ROW_BYTES,
    SLAB_AT,
    SLAB_BYTES,
    SLAB_LEFT,
    SLABS,
    SLABS_ROOM,
    STATE,
    STATE_WIDTH,
    STATISTICS_BYTES,
    TABLE_LOCK,
    WHOLE_ROWS,
    WIDTH,
    ZERO_INIT,
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
    none,
    part,
    release,
    uints,
    unlock_mutex,
    unmix,
    words,
)
from fleet.ps.table.kernels.draws import uniform_of
from fleet.ps.table.kernels.index import insert_entry

# What a find does with the ids it meets; COUNT is a push, ADD the same without the gate of create_by_score.
FIND_ONLY, CREATE, COUNT, ADD = 0, 1, 2, 3
_COUNT_ONE, _COUNT_MASK = 1 << 48, 0x7FFF << 48
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
    return chunk + (slot & (CHUNK_ROWS - 1)) * words(table)[ROW_BYTES]


@part(i64(i64, i64, i64))
def statistics_at(table, sub, slot):
    """Returns the address of a slot's statistics: float64 show and click, float32 delta score, uint32 slot."""
    chunk = words(words(sub)[CHUNKS])[slot >> CHUNK_SHIFT]
    return chunk + CHUNK_ROWS * words(table)[ROW_BYTES] + (slot & (CHUNK_ROWS - 1)) * STATISTICS_BYTES


@part(i64(i64, i64))
def new_slot(table, sub):
    """Returns a free slot, or -1 without memory."""
    shard = words(sub)
    if shard[FREE_SLOT] != 0:
        slot = shard[FREE_SLOT] - 1
        shard[FREE_SLOT] = i64(uints(row_at(table, sub, slot))[0])
        shard[NUM_ROWS] += 1
        return slot
    slot = shard[NEXT_SLOT]
    if slot == shard[NUM_CHUNKS] * CHUNK_ROWS:
        if shard[NUM_CHUNKS] == shard[CHUNKS_ROOM]:
            room = 2 * shard[CHUNKS_ROOM] + 4
            chunks = longer_list(shard[CHUNKS], shard[NUM_CHUNKS], room)
            if chunks == 0:
                return -1
            shard[CHUNKS], shard[CHUNKS_ROOM] = chunks, room
        chunk = new_chunk(table)
        if chunk == 0:
            return -1
        words(shard[CHUNKS])[shard[NUM_CHUNKS]] = chunk
        shard[NUM_CHUNKS] += 1
    shard[NEXT_SLOT] += 1
    shard[NUM_ROWS] += 1
    return slot


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
    slot = new_slot(table, sub)
    if slot < 0:
        return -1
    header, row = words(table), row_at(table, sub, slot)
    fill_bytes(row, i32(0), header[ROW_BYTES])
    initialise_block(table, row, h, i64(0))
    if header[NUM_BLOCKS] == 2 and header[WHOLE_ROWS] != 0:
        initialise_block(table, row, h, i64(1))
    if header[HAS_STATISTICS] != 0:
        fill_bytes(statistics_at(table, sub, slot), i32(0), STATISTICS_BYTES)
    return slot


@part(i64(i64, i64, i64, boolean))
def meta_of(table, slot, count, has_embedx):
    """Returns the second word of an entry seen today."""
    meta = slot | ((words(table)[DAY] & 0xFFFF) << 32) | (min(count, 32767) << 48)
    return meta | i64(-(2**63)) if has_embedx else meta


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


@c_function(i64(*ADMIT_ARGUMENTS))
def admit(table, sub, h, at, mode, score, nonce):
    """Gives a missing id its entry (``at`` 0), or counts a push on an id not admitted yet, and the row if admitted.

    Returns the slot, -1 for none, -2 without memory.
    """
    header, count, needed = words(table), i64(0), i64(1)
    if at == 0 and not may_start(table, h, score if mode == COUNT else 1.0, nonce):
        return i64(-1)
    if header[ADMISSION] == 1:
        needed = header[ADMISSION_ARGUMENT]
        if mode == CREATE:
            return i64(-1)
    if at != 0:
        count = words(at)[1] & PENDING_COUNT
    count += mode >= COUNT
    if mode >= COUNT and count < needed:
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
