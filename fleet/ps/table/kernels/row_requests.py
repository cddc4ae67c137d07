# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Request kernels: pull, push, add and contains of a batch of keys, one call each, from any number of threads.

The batch is grouped by sub-shard. Each group takes its lock once, finds all its rows (index lines and rows are
prefetched), then moves the data. All arguments are int64; an address of 0 stands for an array that was not given. A
status of 1 means that memory ran out.
"""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    BLOCK_WORDS,
    BLOCKS,
    BY_COUNT,
    COLUMN,
    DISK_FROM,
    DRAWS,
    EMBEDX_THRESHOLD,
    FIND,
    FLOATS,
    GROUP,
    HAS_EMBEDX,
    HAS_STATISTICS,
    IN_MEMORY,
    LOW32,
    NUM_BLOCKS,
    NUM_COUNTERS,
    NUM_WEIGHTS,
    PARAMS,
    RANKED,
    ROW_BYTES,
    SCALES_BY_SHOW,
    STATE,
    SUB_SHARDS,
    SUB_WORDS,
    TICK,
    UNRANKED,
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
from fleet.ps.table.kernels.finding import HASHES, SMALL_BATCH, order_in, rows_in, score_of, slots_in
from fleet.ps.table.kernels.row_kernels import (
    ADD,
    COUNT,
    FIND_ONLY,
    draw_weights,
    find,
    initialise_block,
    initialise_state,
    is_cold,
    move_row,
    new_slot,
    rank_at,
    read_cold,
    row_at,
    statistics_at,
    use_cold,
)

LINE_BYTES = 512
_EMBEDX_BIT = -(2**63)
_COUNT_SHIFT, _MOST_COUNTED = 48, 32767


@part(none(i64, i64, i64, i64, i64, i64, i64))
def copy_out(table, sub, order, n, slots, out, hashes):
    """Writes the pulled columns of found rows; for the others zeros, or initial weights where ``hashes`` is not 0."""
    counters, width, cold = words(table)[NUM_COUNTERS], words(table)[NUM_WEIGHTS], words(table)[DISK_FROM] != 0
    for i in range(n):
        slot = words(slots)[i]
        line = out + 4 * i64(ints(order)[i]) * (counters + width)
        weights_at = line + 4 * counters
        if slot < 0:
            for j in range(counters + width):
                floats(line)[j] = f32(0)
            if hashes != 0:
                draw_weights(table, words(hashes)[i], weights_at)
            continue
        if counters != 0:
            if cold and is_cold(table, sub, slot & LOW32):
                use_cold(table)
            numbers = doubles(statistics_at(table, sub, slot & LOW32))
            floats(line)[0] = f32(numbers[0])
            floats(line)[1] = f32(numbers[1])
        if cold and is_cold(table, sub, slot & LOW32):
            read_cold(table, row_at(table, sub, slot & LOW32), weights_at, 4 * width)
            continue
        source, target = floats(row_at(table, sub, slot & LOW32)), floats(weights_at)
        for j in range(width):
            target[j] = source[j]


@part(i64(i64))
def span_of(n):
    """Returns how many sub-shards a request of ``n`` keys holds at a time.

    A few keys each from one sub-shard after the other would wait for memory every time; eight at once overlap.
    Locks are always taken upwards, so requests cannot wait for each other in a circle.
    """
    return i64(8) if n <= SMALL_BATCH else i64(1)


@part(i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64))
def hold(table, scratch, n, first, mode, shows, clicks, nonce, line_bytes, data, data_bytes):
    """Locks a span of sub-shards from ``first`` on and finds the rows of their keys; returns 1 without memory."""
    header, bounds, status = words(table), words(scratch), i64(0)
    hashes, order, slots = scratch + 8 * HASHES, order_in(scratch, n), slots_in(scratch, n)
    for s in range(first, first + span_of(n)):
        lo, m = bounds[s], bounds[s + 1] - bounds[s]
        if m != 0:
            sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
            lock_mutex(sub)
            if status == 0:
                status = call_find(
                    header[FIND], table, sub, hashes + 8 * lo, order + 4 * lo, m, mode, shows, clicks, nonce,
                    slots + 8 * lo, line_bytes, data, data_bytes,
                )  # fmt: skip
    return status


@part(none(i64, i64, i64, i64))
def let_go(table, scratch, n, first):
    """Unlocks what :func:`hold` locked."""
    for s in range(first, first + span_of(n)):
        if words(scratch)[s + 1] != words(scratch)[s]:
            unlock_mutex(words(table)[SUB_SHARDS] + 8 * SUB_WORDS * s)


@kernel
def pull(table, keys, n, out, drawn, scratch):
    """Writes the pulled columns of each key to ``out``; no row is made.

    Those of a missing row are the weights that it would begin with where ``drawn`` is not 0 and the table draws them,
    else zeros.
    """
    header, bounds = words(table), words(scratch)
    first = 0
    draws = drawn != 0 and header[DRAWS] != 0
    call_group(header[GROUP], table, keys, n, scratch)
    line_bytes, out_bytes = min(4 * header[NUM_WEIGHTS], LINE_BYTES), 4 * (header[NUM_COUNTERS] + header[NUM_WEIGHTS])
    while first < 64:
        hold(table, scratch, n, first, FIND_ONLY, 0, 0, 0, line_bytes, out, out_bytes)
        for s in range(first, first + span_of(n)):
            lo, m = bounds[s], bounds[s + 1] - bounds[s]
            sub = header[SUB_SHARDS] + 8 * SUB_WORDS * s
            hashes = scratch + 8 * (HASHES + lo) if draws else 0
            copy_out(table, sub, order_in(scratch, n) + 4 * lo, m, slots_in(scratch, n) + 8 * lo, out, hashes)
        let_go(table, scratch, n, first)
        first += span_of(n)
    return 0


@kernel
def pull_each(tables, ends, count, keys, out, drawn, scratch):
    """Does for each of ``count`` tables what :func:`pull` does, with its keys and rows behind those of the one before.

    A table without keys is left alone.
    """
    start = i64(0)
    for i in range(count):
        table, n = words(tables)[i], words(ends)[i] - start
        line_bytes = 4 * (words(table)[NUM_COUNTERS] + words(table)[NUM_WEIGHTS])
        if n != 0:
            pull(table, keys + 8 * start, n, out + line_bytes * start, drawn, scratch)
        start += n
    return 0


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


@part(none(i64, i64, i64, i64))
def warm_rows(table, scratch, n, s):
    """Moves the found rows of a sub-shard from disk to memory, as far as that has room."""
    sub, slots, hashes = words(table)[SUB_SHARDS] + 8 * SUB_WORDS * s, words(slots_in(scratch, n)), words(scratch)
    for i in range(words(scratch)[s], words(scratch)[s + 1]):
        if slots[i] >= 0 and is_cold(table, sub, slots[i] & LOW32):
            at = find(sub, hashes[HASHES + i])  # a key that the request repeats has moved already
            if is_cold(table, sub, words(at)[1] & LOW32):
                fresh = new_slot(table, sub, i64(IN_MEMORY))
                if fresh >= 0:
                    move_row(table, sub, at, fresh)
                else:
                    use_cold(table)
            slots[i] = (slots[i] & ~LOW32) | (words(at)[1] & LOW32)


@part(none(i64, i64, i64, i64))
def stamp_ranks(table, sub, n, slots):
    """Writes the rank of the change in progress to the found rows, see [Note: Eviction]."""
    header, tick = words(table), words(table)[TICK]
    for i in range(n):
        slot = words(slots)[i]
        if slot >= 0:
            rank = words(rank_at(table, sub, slot & LOW32))
            if header[RANKED] == BY_COUNT:
                count = min((rank[0] >> _COUNT_SHIFT) + 1, _MOST_COUNTED)
                rank[0] = (count << _COUNT_SHIFT) | tick
            else:
                rank[0] = tick


@part(none(*(i64,) * 9))
def update_block(table, sub, block, order, n, slots, rows, gradients, shows):
    """Applies the rule of one block to the found rows; the second block only where it exists."""
    header, place = words(table), words(table + 8 * (BLOCKS + BLOCK_WORDS * block))
    for i in range(n):
        slot = words(slots)[i]
        present = slot >= 0 and (block == 0 or slot & HAS_EMBEDX != 0)
        words(rows)[i] = row_at(table, sub, slot & LOW32) if present else 0
    scaling_shows = shows if header[SCALES_BY_SHOW] != 0 else 0
    call_update(
        place[UPDATE], rows, n, order, gradients, header[NUM_WEIGHTS], scaling_shows, place[COLUMN], place[WIDTH],
        place[STATE], place[PARAMS],
    )  # fmt: skip


@part(none(i64, i64, i64, i64, i64, i64, i64, i64))
def push_shard(table, scratch, n, s, gradients, shows, clicks, features):
    """Applies a push to the found rows of one sub-shard."""
    header, lo = words(table), words(scratch)[s]
    m, sub = words(scratch)[s + 1] - lo, header[SUB_SHARDS] + 8 * SUB_WORDS * s
    order, slots = order_in(scratch, n) + 4 * lo, slots_in(scratch, n) + 8 * lo
    if header[DISK_FROM] != 0:
        warm_rows(table, scratch, n, s)
    if header[HAS_STATISTICS] != 0:
        count_traffic(table, sub, order, m, slots, shows, clicks, features)
    for block in range(header[NUM_BLOCKS]):
        update_block(table, sub, block, order, m, slots, rows_in(scratch, n), gradients, shows)
    if header[RANKED] != UNRANKED:
        stamp_ranks(table, sub, m, slots)
    if header[NUM_BLOCKS] == 2:
        extend_rows(table, sub, scratch + 8 * (HASHES + lo), m, slots)


@kernel
def push(table, keys, n, gradients, shows, clicks, features, nonce, scratch):
    """Applies one gradient row per key."""
    header = words(table)
    status = first = 0
    call_group(header[GROUP], table, keys, n, scratch)
    line_bytes, data_bytes = min(header[ROW_BYTES], LINE_BYTES), 4 * header[NUM_WEIGHTS]
    while first < 64 and status == 0:
        status = hold(table, scratch, n, first, COUNT, shows, clicks, nonce, line_bytes, gradients, data_bytes)
        for s in range(first, first + span_of(n) if status == 0 else first):
            if words(scratch)[s + 1] != words(scratch)[s]:
                push_shard(table, scratch, n, s, gradients, shows, clicks, features)
        let_go(table, scratch, n, first)
        first += span_of(n)
    return status


@kernel
def push_each(tables, ends, count, keys, gradients, shows, clicks, features, nonce, tick, scratch):
    """Does for each of ``count`` tables what :func:`push` does, as change ``tick``.

    Returns the number of the table without memory, from 1.
    """
    start = i64(0)
    for i in range(count):
        table, n = words(tables)[i], words(ends)[i] - start
        words(table)[TICK] = tick
        rows = gradients + 4 * words(table)[NUM_WEIGHTS] * start
        show = shows + 4 * start if shows != 0 else i64(0)
        click = clicks + 4 * start if clicks != 0 else i64(0)
        feature = features + 4 * start if features != 0 else i64(0)
        if n != 0 and push(table, keys + 8 * start, n, rows, show, click, feature, nonce, scratch) != 0:
            return i + 1
        start += n
    return 0


@part(none(i64, i64, i64, i64, i64))
def add_shard(table, scratch, n, s, deltas):
    """Adds deltas to the found rows of one sub-shard."""
    sub, width = words(table)[SUB_SHARDS] + 8 * SUB_WORDS * s, words(table)[NUM_WEIGHTS]
    lo = words(scratch)[s]
    if words(table)[DISK_FROM] != 0:
        warm_rows(table, scratch, n, s)
    if words(table)[RANKED] != UNRANKED:
        stamp_ranks(table, sub, words(scratch)[s + 1] - lo, slots_in(scratch, n) + 8 * lo)
    for i in range(words(scratch)[s], words(scratch)[s + 1]):
        slot = words(slots_in(scratch, n))[i]
        if slot >= 0:
            weights = floats(row_at(table, sub, slot & LOW32))
            delta = floats(deltas + 4 * i64(ints(order_in(scratch, n))[i]) * width)
            for j in range(width):
                weights[j] += delta[j]
            if slot & HAS_EMBEDX == 0:
                if words(table)[NUM_BLOCKS] == 2:
                    initialise_state(table, row_at(table, sub, slot), i64(1))
                words(find(sub, words(scratch)[HASHES + i]))[1] |= i64(_EMBEDX_BIT)


@kernel
def add(table, keys, n, deltas, nonce, scratch):
    """Adds one row of deltas per key to the weights."""
    header = words(table)
    status = first = 0
    call_group(header[GROUP], table, keys, n, scratch)
    data_bytes = 4 * header[NUM_WEIGHTS]
    while first < 64 and status == 0:
        status = hold(table, scratch, n, first, ADD, 0, 0, nonce, min(data_bytes, LINE_BYTES), deltas, data_bytes)
        for s in range(first, first + span_of(n) if status == 0 else first):
            add_shard(table, scratch, n, s, deltas)
        let_go(table, scratch, n, first)
        first += span_of(n)
    return status


@kernel
def contains(table, keys, n, out, scratch):
    """Writes 1 for each key that has a row, 0 for the others."""
    first = 0
    call_group(words(table)[GROUP], table, keys, n, scratch)
    while first < 64:
        hold(table, scratch, n, first, FIND_ONLY, 0, 0, 0, 0, 0, 0)
        let_go(table, scratch, n, first)
        first += span_of(n)
    for i in range(n):
        octets(out)[ints(order_in(scratch, n))[i]] = words(slots_in(scratch, n))[i] >= 0
    return 0
