# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Kernels for gradients: the distinct keys of a batch, their places in an array, sums and means, one step of SGD."""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    call_update,
    copy_line,
    f32,
    fence,
    floats,
    i32,
    i64,
    ints,
    kernel,
    mix,
    octets,
    prefetch,
    small_part,
    u64,
    words,
)

_AHEAD = 16  # keys between the prefetch of an entry and its use
PIECE = 1 << 10  # so many sums stay in the processor's first cache until they are complete


@kernel
def unique_keys(keys, n, seen, bits, generation, unique, inverse):
    """Writes the distinct keys in order of first appearance and each key's place among them; returns how many.

    ``seen`` holds 2^bits entries of (key, generation << 32 | place); entries of an older generation count as empty,
    so nothing needs clearing between batches.
    """
    source, distinct, places = words(keys), words(unique), ints(inverse)
    shift, mask, stamp = u64(64 - bits), (i64(1) << bits) - 1, generation << 32
    count = i64(0)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(seen + 16 * i64(mix(source[i + _AHEAD]) >> shift))
        key = source[i]
        at = i64(mix(key) >> shift)
        while True:
            entry = words(seen + 16 * at)
            if (entry[1] >> 32) != generation:
                entry[0] = key
                entry[1] = stamp | count
                distinct[count] = key
                places[i] = i32(count)
                count += 1
                break
            if entry[0] == key:
                places[i] = i32(entry[1] & 0xFFFFFFFF)
                break
            at = (at + 1) & mask
    return count


@kernel
def unique_keys_of_parts(keys, ends, num_parts, seen, bits, generation, unique, counts, inverse):
    """Does for each part of the keys what :func:`unique_keys` does, at the place of the part in the results.

    The parts take ``num_parts`` generations from ``generation`` on.
    """
    last, found, start = words(ends), words(counts), i64(0)
    for i in range(num_parts):
        size = last[i] - start
        found[i] = unique_keys(
            keys + 8 * start, size, seen, bits, generation + i, unique + 8 * start, inverse + 4 * start
        )
        start = last[i]


@kernel
def find_places(keys, n, entries, bits, places):
    """Writes the place of each key, -1 where it is unknown.

    ``entries`` holds 2^bits pairs of (key, place + 1); empty pairs are zeros.
    """
    source, found = words(keys), words(places)
    shift, mask = u64(64 - bits), (i64(1) << bits) - 1
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(entries + 16 * i64(mix(source[i + _AHEAD]) >> shift))
        at = i64(mix(source[i]) >> shift)
        while True:
            entry = words(entries + 16 * at)
            if entry[1] == 0 or entry[0] == source[i]:
                found[i] = entry[1] - 1
                break
            at = (at + 1) & mask


@kernel
def insert_places(keys, n, first, entries, bits):
    """Enters distinct keys that are not there with the places from ``first`` on; there must be room for them."""
    source = words(keys)
    shift, mask = u64(64 - bits), (i64(1) << bits) - 1
    for i in range(n):
        at = i64(mix(source[i]) >> shift)
        while words(entries + 16 * at)[1] != 0:
            at = (at + 1) & mask
        entry = words(entries + 16 * at)
        entry[0] = source[i]
        entry[1] = first + i + 1


@kernel
def merge_rows(gradients, inverse, n, dim, out, num_unique):
    """Writes to ``out`` the sum of the gradient rows of each distinct key, added in input order."""
    places, total = ints(inverse), floats(out)
    for i in range(num_unique * dim):
        total[i] = 0.0
    for i in range(n):
        source, target = floats(gradients + 4 * i * dim), floats(out + 4 * i64(places[i]) * dim)
        for j in range(dim):
            target[j] += source[j]


@kernel
def merge_bags(gradients, starts, ends, inverse, num_bags, dim, is_mean, out, num_unique):
    """Writes to ``out`` the sum over the keys of bags of the bags' gradients, by distinct key, added in input order."""
    first, last, places, total = words(starts), words(ends), ints(inverse), floats(out)
    for i in range(num_unique * dim):
        total[i] = 0.0
    for bag in range(num_bags):
        source, share = floats(gradients + 4 * bag * dim), f32(1.0)
        if is_mean and last[bag] > first[bag]:
            share = f32(1.0) / f32(last[bag] - first[bag])
        for i in range(first[bag], last[bag]):
            target = floats(out + 4 * i64(places[i]) * dim)
            for j in range(dim):
                target[j] += share * source[j]


@small_part
def sum_but_last(sources, count, start, size, out):
    """Returns where the sums of ``size`` numbers from ``start`` are, of all arrays but the last one: ``out``, or there.

    They are added in order; 0 has still to be added to the numbers of a single array.
    """
    arrays, none, first = words(sources), f32(0.0), words(sources)[0] + 4 * start
    for i in range(1, count - 1):
        total, so_far, source = floats(out), floats(first), floats(arrays[i] + 4 * start)
        for j in range(size):
            total[j] = (none + so_far[j]) + source[j]
        first = out
    return first


@small_part
def mean_of_piece(sources, count, start, size, divisor, out):
    """Writes the sums of ``size`` numbers from ``start`` of ``count`` arrays, added in order to 0, over ``divisor``."""
    total, scale, none = floats(out), f32(divisor), f32(0.0)
    first, last = floats(sum_but_last(sources, count, start, size, out)), floats(words(sources)[count - 1] + 4 * start)
    if count == 1:
        for j in range(size):
            total[j] = (none + first[j]) / scale
        return
    for j in range(size):
        total[j] = ((none + first[j]) + last[j]) / scale


@kernel
def mean_of(sources, count, n, divisor, out):
    """Writes the means of ``count`` arrays of ``n`` numbers."""
    for start in range(0, n, PIECE):
        mean_of_piece(sources, count, start, min(PIECE, n - start), divisor, out + 4 * start)


@kernel
def push_mean(sources, count, n, divisor, piece, update, row, places, params):
    """Updates a row of ``n`` weights, which its state follows, by the mean of ``count`` gradients.

    The mean is never in memory as a whole, but a :data:`PIECE` at a time in ``piece``. ``update`` is the address of a
    rule whose elements do not depend on each other; ``places`` is room for two words.
    """
    rows, order = words(places), places + 8
    rows[0] = row
    ints(order)[0] = i32(0)
    for start in range(0, n, PIECE):
        size = min(PIECE, n - start)
        mean_of_piece(sources, count, start, size, divisor, piece)
        call_update(update, places, 1, order, piece - 4 * start, n, 0, start, size, n + start, params)


@kernel
def copy_for_others(sources, lengths, num, target):
    """Copies ``num`` arrays of float32, one behind the other, for a processor that reads them next.

    The copies do not go through this processor's caches: its own data stay there, and the reader fetches from memory.
    """
    for i in range(num):
        source, n = words(sources)[i], words(lengths)[i]
        # copy_line writes whole lines at multiples of 64 alone; the ends before and after go number by number.
        before = min(n, (-target % 64) // 4)
        for j in range(before):
            floats(target)[j] = floats(source)[j]
        lines = (n - before) // 16
        for j in range(before, before + 16 * lines, 16):
            copy_line(target + 4 * j, source + 4 * j)
        for j in range(before + 16 * lines, n):
            floats(target)[j] = floats(source)[j]
        target += 4 * n
    fence()


@kernel
def train_rows(weight, rows, dim, places, n, gradients, rate, touched):
    """Does ``weight[place] -= rate * gradient`` for each place, in their order, and notes the places as touched.

    Returns whether it did: not where one of them is none of the ``rows`` places.
    """
    at, step, notes = words(places), f32(rate), octets(touched)
    # All places before the first write: a wrong one must not leave half a step in the weights.
    for i in range(n):
        if not 0 <= at[i] < rows:
            return False
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(weight + 4 * at[i + _AHEAD] * dim)
            prefetch(touched + at[i + _AHEAD])
        source, target = floats(gradients + 4 * i * dim), floats(weight + 4 * at[i] * dim)
        for j in range(dim):
            target[j] -= step * source[j]
        notes[at[i]] = 1
    return True
