# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Request kernels: pull, push and add of a batch of keys, one call each, safe from any number of threads.

The batch is grouped by sub-shard; each group takes its lock once, finds all its rows (index lines and rows are
prefetched), then moves the data. All arguments are int64; an address of 0 is an array that was not given. A status
of 1 means that memory ran out.
"""

from __future__ import annotations

from fleet.ps._kernels import (
    BLOCK_WORDS,
    BLOCKS,
    COLUMN,
    CREATE_ON_PULL,
    EMBEDX_THRESHOLD,
    FIND,
    FLOATS,
    GROUP,
    HAS_EMBEDX,
    HAS_STATISTICS,
    LOW32,
    NUM_BLOCKS,
    NUM_COUNTERS,
    NUM_WEIGHTS,
    PARAMS,
    ROW_BYTES,
    SCALES_BY_SHOW,
    STATE,
    SUB_SHARDS,
    SUB_WORDS,
    UPDATE,
    WIDTH,
    call_find,
    call_group,
    call_update,
    doubles,
    f32,
    f64,
    floats,
    i64,
    ints,
    kernel,
    lock_mutex,
    none,
    octets,
    part,
    uints,
    unlock_mutex,
    words,
)
from fleet.ps._kernels_find import HASHES, order_in, rows_in, score_of, slots_in
from fleet.ps._kernels_index import find
from fleet.ps._kernels_rows import ADD, COUNT, CREATE, FIND_ONLY, initialise_block, row_at, statistics_at

_LINES_BYTES = 512
_EMBEDX_BIT = -(2**63)



@part(none(i64, i64, i64, i64, i64, i64))
def copy_out(table, sub, order, n, slots, out):
    """Writes the pulled columns of found rows, zeros for the others."""
    counters, width = words(table)[NUM_COUNTERS], words(table)[NUM_WEIGHTS]
    for i in range(n):
        slot, place = words(slots)[i], i64(ints(order)[i])
        target = floats(out + 4 * place * (counters + width))
        if slot < 0:
            for j in range(counters + width):
                target[j] = f32(0)
            continue
        if counters != 0:
            numbers = doubles(statistics_at(table, sub, slot & LOW32))
            target[0], target[1] = f32(numbers[0]), f32(numbers[1])
            target = floats(out + 4 * (place * (counters + width) + counters))
        source = floats(row_at(table, sub, slot & LOW32))
        for j in range(width):
            target[j] = source[j]


@kernel
def pull(table, keys, n, out, create, scratch):
    """Writes the pulled columns of each key to ``out``, zeros for a missing row."""
    header, status = words(table), 0
    mode = i64(CREATE) if create != 0 and header[CREATE_ON_PULL] != 0 else i64(FIND_ONLY)
    call_group(header[GROUP], keys, n, scratch)
    bounds, hashes, order, slots = words(scratch), scratch + 8 * HASHES, order_in(scratch, n), slots_in(scratch, n)
    line_bytes = min(4 * header[NUM_WEIGHTS], _LINES_BYTES)
    for s in range(64):
        lo, m = bounds[s], bounds[s + 1] - bounds[s]
        if m != 0 and status == 0:
            sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
            lock_mutex(sub)
            status = call_find(
                header[FIND], table, sub, hashes + 8 * lo, order + 4 * lo, m, mode, 0, 0, 0, slots + 8 * lo, line_bytes)
            if status == 0:
                copy_out(table, sub, order + 4 * lo, m, slots + 8 * lo, out)
            unlock_mutex(sub)
    return status


@part(none(i64, i64, i64, i64, i64, i64, i64, i64))
def count_traffic(table, sub, order, n, slots, shows, clicks, features):
    """Adds the pushed shows, clicks and scores to the statistics of each row."""
    for i in range(n):
        slot, place = words(slots)[i], ints(order)[i]
        if slot >= 0:
            at = statistics_at(table, sub, slot & LOW32)
            show = 1.0 if shows == 0 else f64(floats(shows)[place])
            click = 0.0 if clicks == 0 else f64(floats(clicks)[place])
            doubles(at)[0] += show
            doubles(at)[1] += click
            floats(at)[4] += f32(score_of(table, show, click))
            if features != 0:
                uints(at)[5] = uints(features)[place]


@part(none(i64, i64, i64, i64, i64))
def extend_rows(table, sub, hashes, n, slots):
    """Creates the embedx part of rows whose score has reached the threshold."""
    threshold = doubles(words(table)[FLOATS])[EMBEDX_THRESHOLD]
    for i in range(n):
        slot, h = words(slots)[i], words(hashes)[i]
        if slot >= 0 and slot & HAS_EMBEDX == 0:
            numbers = doubles(statistics_at(table, sub, slot))
            if score_of(table, numbers[0], numbers[1]) >= threshold:
                initialise_block(table, row_at(table, sub, slot), h, i64(1))
                words(find(sub, h))[1] |= i64(_EMBEDX_BIT)


@part(none(*(i64,) * 9))
def update_block(table, sub, block, order, n, slots, rows, gradients, shows):
    """Applies the rule of one block to the found rows; the second block only where it exists."""
    header, place = words(table), words(table + 8 * (BLOCKS + BLOCK_WORDS * block))
    for i in range(n):
        slot = words(slots)[i]
        present = slot >= 0 and (block == 0 or slot & HAS_EMBEDX != 0)
        words(rows)[i] = row_at(table, sub, slot & LOW32) if present else 0
    call_update(
        place[UPDATE], rows, n, order, gradients, header[NUM_WEIGHTS],
        shows if header[SCALES_BY_SHOW] != 0 else 0, place[COLUMN], place[WIDTH], place[STATE], place[PARAMS])


@kernel
def push(table, keys, n, gradients, shows, clicks, features, nonce, scratch):
    """Applies one gradient row per key."""
    header, status = words(table), 0
    call_group(header[GROUP], keys, n, scratch)
    bounds, hashes, order, slots = words(scratch), scratch + 8 * HASHES, order_in(scratch, n), slots_in(scratch, n)
    rows, line_bytes = rows_in(scratch, n), min(header[ROW_BYTES], _LINES_BYTES)
    for s in range(64):
        lo, m = bounds[s], bounds[s + 1] - bounds[s]
        if m == 0 or status != 0:
            continue
        sub, places, group_slots = header[SUB_SHARDS] + 8 * SUB_WORDS * s, order + 4 * lo, slots + 8 * lo
        lock_mutex(sub)
        status = call_find(
            header[FIND], table, sub, hashes + 8 * lo, places, m, COUNT, shows, clicks, nonce, group_slots, line_bytes)
        if status == 0:
            if header[HAS_STATISTICS] != 0:
                count_traffic(table, sub, places, m, group_slots, shows, clicks, features)
            for block in range(header[NUM_BLOCKS]):
                update_block(table, sub, block, places, m, group_slots, rows, gradients, shows)
            if header[NUM_BLOCKS] == 2:
                extend_rows(table, sub, hashes + 8 * lo, m, group_slots)
        unlock_mutex(sub)
    return status


@kernel
def add(table, keys, n, deltas, nonce, scratch):
    """Adds one row of deltas per key to the weights."""
    header, status = words(table), 0
    width = header[NUM_WEIGHTS]
    call_group(header[GROUP], keys, n, scratch)
    bounds, hashes, order, slots = words(scratch), scratch + 8 * HASHES, order_in(scratch, n), slots_in(scratch, n)
    for s in range(64):
        lo, m = bounds[s], bounds[s + 1] - bounds[s]
        if m == 0 or status != 0:
            continue
        sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
        lock_mutex(sub)
        status = call_find(
            header[FIND], table, sub, hashes + 8 * lo, order + 4 * lo, m, ADD, 0, 0, nonce, slots + 8 * lo,
            min(4 * width, _LINES_BYTES))
        for i in range(lo, lo + m if status == 0 else lo):
            slot = words(slots)[i]
            if slot >= 0:
                weights = floats(row_at(table, sub, slot & LOW32))
                delta = floats(deltas + 4 * i64(ints(order)[i]) * width)
                for j in range(width):
                    weights[j] += delta[j]
                if slot & HAS_EMBEDX == 0:
                    words(find(sub, words(hashes)[i]))[1] |= i64(_EMBEDX_BIT)
        unlock_mutex(sub)
    return status


@kernel
def contains(table, keys, n, out, scratch):
    """Writes 1 for each key that has a row, 0 for the others."""
    header = words(table)
    call_group(header[GROUP], keys, n, scratch)
    bounds, hashes, order, slots = words(scratch), scratch + 8 * HASHES, order_in(scratch, n), slots_in(scratch, n)
    for s in range(64):
        lo, m = bounds[s], bounds[s + 1] - bounds[s]
        if m != 0:
            sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
            lock_mutex(sub)
            call_find(
                header[FIND], table, sub, hashes + 8 * lo, order + 4 * lo, m, FIND_ONLY, 0, 0, 0, slots + 8 * lo, 0)
            unlock_mutex(sub)
    for i in range(n):
        octets(out)[ints(order)[i]] = words(slots)[i] >= 0
    return 0
