# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Walk kernels: open and close a table, copy, insert, shrink and settle its rows; list, delete and cool them by rank.

A window is an interval of places in one sub-shard. Entries keep to their interval whatever is inserted, erased or
moved by growth between two windows, so a walk meets every row that exists throughout exactly once.
"""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    CAPACITY,
    CHUNK_ROWS,
    CHUNKS,
    DAY,
    DISK_LEFT,
    EMPTY,
    FIND,
    GROUP,
    HAS_STATISTICS,
    HOT_ROWS,
    IN_MEMORY,
    INDEX,
    LENGTH,
    LOW32,
    NEXT_SLOT,
    NUM_CHUNKS,
    NUM_ENTRIES,
    NUM_ROWS,
    NUM_SLABS,
    ON_DISK,
    PENDING,
    PENDING_COUNT,
    RANKED,
    ROW_BYTES,
    SLAB_AT,
    SLAB_BYTES,
    SLAB_LEFT,
    SLABS,
    SLABS_ROOM,
    SPARE_CHUNK,
    STATISTICS_BYTES,
    SUB_SHARDS,
    SUB_WORDS,
    TABLE_LOCK,
    TIER_WORDS,
    UNRANKED,
    boolean,
    call_find,
    call_group,
    copy_bytes,
    create_mutex,
    doubles,
    f64,
    fill_bytes,
    floats,
    i32,
    i64,
    ints,
    kernel,
    lock_mutex,
    none,
    part,
    place_of,
    release,
    unlock_mutex,
    unmix,
    words,
)
from fleet.ps.table.kernels.finding import (
    HASHES,
    order_in,
    score_of,
    slots_in,
)
from fleet.ps.table.kernels.index_growth import FIRST_CAPACITY
from fleet.ps.table.kernels.row_kernels import (
    FIND_ONLY,
    any_slot,
    find,
    free_slot,
    grow,
    insert_entry,
    is_cold,
    move_row,
    new_slot,
    rank_at,
    row_at,
    set_link,
    statistics_at,
    use_cold,
)

# -- walks -------------------------------------------------------------------------------------------------------------


@part(none(i64, i64))
def erase_entry(sub, at):
    """Removes the entry at address ``at``; later entries of its run move towards their places."""
    shard = words(sub)
    hole, scan = at, at + 16
    while True:
        entry = words(scan)
        if (entry[1] & LOW32) == EMPTY:
            break
        home = shard[INDEX] + 16 * ((place_of(entry[0]) * shard[CAPACITY]) >> 32)
        if home <= hole:
            words(hole)[0] = entry[0]
            words(hole)[1] = entry[1]
            hole = scan
        scan += 16
    words(hole)[1] = -1
    shard[NUM_ENTRIES] -= 1


@part(none(i64, i64, i64))
def erase_row(table, sub, at):
    """Removes the entry at ``at`` and frees its row."""
    slot = words(at)[1] & LOW32
    if slot & PENDING == 0:
        free_slot(table, sub, slot)
    erase_entry(sub, at)


@part(i64(i64, i64))
def home_of(sub, place):
    """Returns the index address where probing for a place starts."""
    return words(sub)[INDEX] + 16 * ((place * words(sub)[CAPACITY]) >> 32)


@kernel
def copy_rows(table, s, first, last, room, keys, metas, values, statistics, ranks):
    """Copies the rows of places ``first`` to ``last`` (excluded); returns how many, or -1 if ``room`` is too small.

    ``ranks`` is used by tables that have them.
    """
    header = words(table)
    sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
    size = header[ROW_BYTES]
    n = i64(0)
    lock_mutex(sub)
    # Entries lie at their place or behind it: past the last place the walk goes on to the end of the run.
    at, end = home_of(sub, first), home_of(sub, last - 1)
    while True:
        h, meta = words(at)[0], words(at)[1]
        if (meta & LOW32) == EMPTY:
            if at >= end:
                break
        elif first <= place_of(h) < last:
            if n == room:
                n = i64(-1)
                break
            words(keys)[n] = unmix(h)
            words(metas)[n] = meta
            slot = meta & LOW32
            if slot & PENDING == 0:
                if is_cold(table, sub, slot):
                    use_cold(table)
                copy_bytes(values + n * size, row_at(table, sub, slot), size)
                if header[RANKED] != UNRANKED:
                    words(ranks)[n] = words(rank_at(table, sub, slot))[0]
                if header[HAS_STATISTICS] != 0:
                    copy_bytes(statistics + n * STATISTICS_BYTES, statistics_at(table, sub, slot), STATISTICS_BYTES)
            else:
                fill_bytes(values + n * size, i32(0), size)
                if header[HAS_STATISTICS] != 0:
                    fill_bytes(statistics + n * STATISTICS_BYTES, i32(0), STATISTICS_BYTES)
                if header[RANKED] != UNRANKED:
                    words(ranks)[n] = 0
            n += 1
        at += 16
    unlock_mutex(sub)
    return n


@part(i64(*(i64,) * 7))
def insert_row(table, sub, h, meta, values, statistics, rank):
    """Puts one row in, over the one of the same key; returns 1 without memory."""
    header = words(table)
    # Erased and put in anew: the old row may be in the other tier, or wait for admission without a row.
    at = find(sub, h)
    if at != 0:
        erase_row(table, sub, at)
    if meta & PENDING == 0:
        slot = any_slot(table, sub)
        if slot < 0:
            return i64(1)
        if is_cold(table, sub, slot):
            use_cold(table)
        copy_bytes(row_at(table, sub, slot), values, header[ROW_BYTES])
        if header[RANKED] != UNRANKED:
            words(rank_at(table, sub, slot))[0] = rank
        if header[HAS_STATISTICS] != 0:
            copy_bytes(statistics_at(table, sub, slot), statistics, STATISTICS_BYTES)
        meta = (meta & ~LOW32) | slot
    return i64(0) if insert_entry(sub, h, meta) != 0 else i64(1)


@kernel
def insert_rows(table, n, keys, metas, values, statistics, ranks, scratch):
    """Puts rows in, over those of the same keys; returns 1 without memory."""
    header = words(table)
    call_group(header[GROUP], table, keys, n, scratch)
    bounds, hashes, order = words(scratch), scratch + 8 * HASHES, order_in(scratch, n)
    for s in range(64):
        sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
        status = 0
        lock_mutex(sub)
        for i in range(bounds[s], bounds[s + 1]):
            place = i64(ints(order)[i])
            rank = words(ranks)[place] if header[RANKED] != UNRANKED else i64(0)
            row_values, row_statistics = values + place * header[ROW_BYTES], statistics + place * STATISTICS_BYTES
            status |= insert_row(table, sub, words(hashes)[i], words(metas)[place], row_values, row_statistics, rank)
        unlock_mutex(sub)
        if status != 0:
            return i64(1)
    return i64(0)


@part(boolean(i64, i64, i64, f64, f64, f64))
def is_doomed(table, sub, at, least, max_unseen_days, decay):
    """Decays a row's statistics and returns whether the shrink deletes it."""
    header = words(table)
    meta = words(at)[1]
    slot = meta & LOW32
    level = least
    if slot & PENDING == 0:
        level = f64((meta >> 48) & 0x7FFF)
        if header[HAS_STATISTICS] != 0:
            if is_cold(table, sub, slot):
                use_cold(table)
            numbers = doubles(statistics_at(table, sub, slot))
            numbers[0] *= decay
            numbers[1] *= decay
            level = score_of(table, numbers[0], numbers[1])
    unseen = (header[DAY] - (meta >> 32)) & 0xFFFF
    return level < least or unseen > max_unseen_days


@kernel
def shrink_rows(table, s, first, last, least, max_unseen_days, decay, room, keys):
    """Decays statistics, deletes rows below ``least`` or unseen too long, writes their keys and returns how many.

    Returns -1, with nothing done, if ``room`` is less than the entries of the sub-shard.
    """
    sub = words(table)[SUB_SHARDS] + 8 * SUB_WORDS * s
    erased = 0
    lock_mutex(sub)
    if room < words(sub)[NUM_ENTRIES]:
        unlock_mutex(sub)
        return -1
    at, end = home_of(sub, first), home_of(sub, last - 1)
    while True:
        if (words(at)[1] & LOW32) == EMPTY:
            if at >= end:
                break
        elif first <= place_of(words(at)[0]) < last and is_doomed(table, sub, at, least, max_unseen_days, decay):
            words(keys)[erased] = unmix(words(at)[0])
            erase_row(table, sub, at)
            erased += 1
            continue  # a later entry of the run has moved to this address
        at += 16
    unlock_mutex(sub)
    return erased


@kernel
def settle_rows(table, keys, n, delta_scores, scratch):
    """Takes ``delta_scores`` off the rows that still exist."""
    header = words(table)
    call_group(header[GROUP], table, keys, n, scratch)
    bounds, hashes, order, slots = words(scratch), scratch + 8 * HASHES, order_in(scratch, n), slots_in(scratch, n)
    for s in range(64):
        sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
        lock_mutex(sub)
        lo, m = bounds[s], bounds[s + 1] - bounds[s]
        call_find(
            header[FIND], table, sub, hashes + 8 * lo, order + 4 * lo, m, FIND_ONLY, 0, 0, 0, slots + 8 * lo, 0, 0, 0
        )
        for i in range(lo, lo + m):
            slot = words(slots)[i]
            if slot >= 0:
                floats(statistics_at(table, sub, slot & LOW32))[4] -= floats(delta_scores)[ints(order)[i]]
        unlock_mutex(sub)


@kernel
def age_rows(table, s):
    """Keeps unseen days below the wrap of their 16 bits: rows unseen for over 49151 days become 49151 days old."""
    header = words(table)
    sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
    lock_mutex(sub)
    for i in range(words(sub)[LENGTH]):
        entry = words(words(sub)[INDEX] + 16 * i)
        if (entry[1] & LOW32) != EMPTY and ((header[DAY] - (entry[1] >> 32)) & 0xFFFF) > 49151:
            entry[1] = (entry[1] & ~(0xFFFF << 32)) | (((header[DAY] - 49151) & 0xFFFF) << 32)
    unlock_mutex(sub)


# -- bounded tables ----------------------------------------------------------------------------------------------------


@kernel
def list_ranks(table, s, waiting, room, keys, ranks):
    """Writes keys and ranks of the rows of sub-shard ``s``; returns how many, or -1 if ``room`` is too small.

    ``waiting`` 1 lists the ids that wait for admission, with their counts; 2 lists the rows in memory alone.
    """
    header = words(table)
    sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
    n = i64(0)
    lock_mutex(sub)
    index = words(sub)[INDEX]
    for i in range(words(sub)[LENGTH]):
        h = words(index + 16 * i)[0]
        low = words(index + 16 * i)[1] & LOW32
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
    """Deletes the rows of ``keys``, and the entries of keys that wait for admission; returns how many there were."""
    header = words(table)
    call_group(header[GROUP], table, keys, n, scratch)
    bounds, hashes = words(scratch), words(scratch + 8 * HASHES)
    erased = 0
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
    bounds, hashes = words(scratch), words(scratch + 8 * HASHES)
    moved = 0
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


# -- a table's memory --------------------------------------------------------------------------------------------------


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
        release(shard[INDEX])
        release(shard[CHUNKS])
        for i in range(INDEX, SUB_WORDS):
            shard[i] = 0
    for i in range(header[NUM_SLABS]):
        release(words(header[SLABS])[i])
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
        shard[NUM_ENTRIES], shard[NUM_ROWS], shard[HOT_ROWS] = 0, 0, 0
        for i in range(2 * TIER_WORDS):
            shard[NEXT_SLOT + i] = 0
        # Backwards: each goes to the head of the list of spare chunks, so the first chunk is used first again.
        for chunk in range(shard[NUM_CHUNKS] - 1, -1, -1):
            first = chunk * CHUNK_ROWS
            tier = i64(ON_DISK) if is_cold(table, sub, first) else i64(IN_MEMORY)
            place = words(sub + 8 * TIER_WORDS * tier)
            set_link(table, sub, first, tier, place[SPARE_CHUNK])
            place[SPARE_CHUNK] = first + 1
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
