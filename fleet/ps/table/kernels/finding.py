# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The start of every request, as C functions: group the keys by sub-shard, find their rows, make those of pushes."""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    ADMIT,
    ASKED,
    CAPACITY,
    CHUNK_ROWS,
    CHUNK_SHIFT,
    CHUNKS,
    CLICK_COEFF,
    DAY,
    DISK_FROM,
    DISK_TO,
    EMPTY,
    FIND_ARGUMENTS,
    FLOATS,
    GROUP_ARGUMENTS,
    HAS_EMBEDX,
    HAS_STATISTICS,
    INDEX,
    LOW32,
    MISSED,
    NONCLK_COEFF,
    PENDING,
    RANK_STRIDE,
    RANKED,
    RANKS_AT,
    ROW_STRIDE,
    STATISTICS_AT,
    STATISTICS_BYTES,
    STATISTICS_STRIDE,
    SUB_SHARDS,
    SUB_WORDS,
    UNRANKED,
    WILL_NEED,
    advise,
    c_function,
    call_admit,
    doubles,
    f64,
    floats,
    i32,
    i64,
    ints,
    mix,
    none,
    part,
    place_of,
    prefetch,
    sub_shard_of,
    words,
)
from fleet.ps.table.kernels.row_kernels import COUNT, FIND_ONLY

_AHEAD = 12  # keys between the prefetch of an index line and its use
SMALL_BATCH = 4096
_COUNT_ONE, _COUNT_MASK = 1 << 48, 0x7FFF << 48


# [Note: Scratch]
# A request works in scratch_words(n) words of the caller's memory: 65 bounds of the groups, 64 working heads, then n
# mixed bits in group order, n slots, n row addresses, and n input places (int32). The slots hold the mixed bits in
# input order first.
HEADS, HASHES = 72, 136


def scratch_words(n: int) -> int:
    """Returns how many int64 words of scratch a request of ``n`` keys needs."""
    return HASHES + 3 * n + (n + 1) // 2


@part(i64(i64, i64))
def slots_in(scratch, n):
    """Returns the address of the slots."""
    return scratch + 8 * (HASHES + n)


@part(i64(i64, i64))
def rows_in(scratch, n):
    """Returns the address of the row addresses, which a push works with group by group."""
    return scratch + 8 * (HASHES + 2 * n)


@part(i64(i64, i64))
def order_in(scratch, n):
    """Returns the address of the input places."""
    return scratch + 8 * (HASHES + 3 * n)


@c_function(none(*GROUP_ARGUMENTS))
def group_keys(table, keys, n, scratch):
    """Groups keys by sub-shard into ``scratch``, see [Note: Scratch].

    A small batch has few keys per sub-shard, too few to hide how long each takes to load, so all their index lines
    are asked for here. That reads where the index is without the lock: a wrong line is loaded at worst.
    """
    source, edges, heads = words(keys), words(scratch), words(scratch + 8 * HEADS)
    grouped, mixed, places = words(scratch + 8 * HASHES), words(slots_in(scratch, n)), ints(order_in(scratch, n))
    # A counting sort, which keeps the order of input within a sub-shard: equal keys are pushed in that order.
    for s in range(64):
        heads[s] = 0
    for i in range(n):
        h = i64(mix(source[i]))
        mixed[i] = h
        heads[sub_shard_of(h)] += 1
    total = i64(0)
    for s in range(64):
        edges[s] = total
        total += heads[s]
        heads[s] = edges[s]
    edges[64] = total
    for i in range(n):
        s = sub_shard_of(mixed[i])
        grouped[heads[s]] = mixed[i]
        places[heads[s]] = i32(i)
        heads[s] += 1
        if n <= SMALL_BATCH:
            shard = words(words(table)[SUB_SHARDS] + 8 * SUB_WORDS * s)
            prefetch(shard[INDEX] + 16 * ((place_of(mixed[i]) * shard[CAPACITY]) >> 32))


@part(f64(i64, f64, f64))
def score_of(table, show, click):
    """Returns the score of shows and clicks."""
    numbers = doubles(words(table)[FLOATS])
    return (show - click) * numbers[NONCLK_COEFF] + click * numbers[CLICK_COEFF]


@part(f64(i64, i64, i64, i64))
def pushed_score(table, shows, clicks, place):
    """Returns the score that a key brings along."""
    show = 1.0 if shows == 0 else f64(floats(shows)[place])
    return score_of(table, show, 0.0 if clicks == 0 else f64(floats(clicks)[place]))


@part(none(i64, i64))
def start_loading(address, num_bytes):
    """Asks for the cache lines of so many bytes."""
    for line in range(address, address + num_bytes, 64):
        prefetch(line)


@part(none(i64, i64, i64, i64))
def start_rest(table, chunk, place, mode):
    """Starts loading a row on disk, or the statistics and rank that a push needs beside a row in memory."""
    header = words(table)
    if header[DISK_FROM] <= chunk < header[DISK_TO]:
        page = (chunk + place * header[ROW_STRIDE]) & ~4095
        advise(page, chunk + (place + 1) * header[ROW_STRIDE] - page, i32(WILL_NEED))
        return
    if header[HAS_STATISTICS] != 0 and mode == COUNT:
        start_loading(chunk + header[STATISTICS_AT] + place * header[STATISTICS_STRIDE], STATISTICS_BYTES)
    if header[RANKED] != UNRANKED and mode >= COUNT:
        prefetch(chunk + header[RANKS_AT] + place * header[RANK_STRIDE])


@c_function(i64(*FIND_ARGUMENTS))
def find_rows(table, sub, hashes, order, n, mode, shows, clicks, nonce, slots, line_bytes, data, data_bytes):
    """Writes the slots of ``n`` mixed bits (-1 for no row).

    Starts loading ``line_bytes`` of each row, and of each key's line of ``data`` (``data_bytes`` long, in input order).
    ``mode`` FIND_ONLY looks, COUNT and ADD make missing rows and count a push; of pulls, which have
    ``data``, the ids are counted. Returns 1 without memory. The caller holds the sub-shard's lock.
    """
    header, shard, wanted, found, places = words(table), words(sub), words(hashes), words(slots), ints(order)
    counts_more = header[HAS_STATISTICS] != 0 or header[RANKED] != UNRANKED
    scored = mode == COUNT and (shows != 0 or clicks != 0)
    score = score_of(table, 1.0, 0.0)
    today = (header[DAY] & 0xFFFF) << 32
    missed = i64(0)
    # The compiler cannot know that nothing below writes to these words; only an admission does.
    index, capacity, chunks, row_bytes = shard[INDEX], shard[CAPACITY], words(shard[CHUNKS]), header[ROW_STRIDE]
    for i in range(min(_AHEAD, n)):
        prefetch(index + 16 * ((place_of(wanted[i]) * capacity) >> 32))
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(index + 16 * ((place_of(wanted[i + _AHEAD]) * capacity) >> 32))
        h = wanted[i]
        at = index + 16 * ((place_of(h) * capacity) >> 32)
        meta = words(at)[1]
        while words(at)[0] != h and (meta & LOW32) != EMPTY:
            at += 16
            meta = words(at)[1]
        slot = meta & LOW32
        if slot & PENDING == 0:
            if mode >= COUNT:
                counted = meta + _COUNT_ONE if meta & _COUNT_MASK != _COUNT_MASK else meta
                words(at)[1] = (counted & ~(0xFFFF << 32)) | today
            chunk, place = chunks[slot >> CHUNK_SHIFT], slot & (CHUNK_ROWS - 1)
            start_loading(chunk + place * row_bytes, line_bytes)
            if counts_more:
                start_rest(table, chunk, place, mode)
            start_loading(data + i64(places[i]) * data_bytes, min(data_bytes, line_bytes))
            if meta < 0:
                slot |= HAS_EMBEDX
        elif mode == FIND_ONLY:
            slot = i64(-1)
            missed += 1
        else:
            missed += 1
            if scored:
                score = pushed_score(table, shows, clicks, i64(places[i]))
            waiting = i64(0) if slot == EMPTY else at
            slot = call_admit(header[ADMIT], table, sub, h, waiting, mode, score, nonce)
            if slot == -2:
                return i64(1)
            # An admission may have grown the index and the list of chunks.
            index, capacity, chunks = shard[INDEX], shard[CAPACITY], words(shard[CHUNKS])
        found[i] = slot
    if mode == FIND_ONLY and data != 0:
        shard[ASKED] += n
        shard[MISSED] += missed
    return i64(0)
