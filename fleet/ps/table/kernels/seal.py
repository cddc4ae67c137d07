# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kernel of :mod:`fleet.ps.wire.sealed`."""

from __future__ import annotations

from fleet.ps.table.kernels.common import LOW32, i64, kernel, u64, words

LANES = 512


@kernel
def add_lanes(data, count, first, key, sums):
    """Adds ``count`` lanes of 8 bytes, from lane ``first`` of a body on, to the sums of their blocks.

    Block b has the sums 2b and 2b + 1, which its first lane sets; the second sum uses the key of the first, shifted by
    one lane.
    """
    lanes, keys, totals = words(data), words(key), words(sums)
    done = i64(0)
    while done < count:
        block, at = (first + done) // LANES, (first + done) % LANES
        size = min(LANES - at, count - done)
        one, two = u64(0), u64(0)
        for i in range(size):
            x, k, m = u64(lanes[done + i]), u64(keys[at + i]), u64(keys[at + i + 1])
            one += ((x + k) & u64(LOW32)) * (((x >> u64(32)) + (k >> u64(32))) & u64(LOW32))
            two += ((x + m) & u64(LOW32)) * (((x >> u64(32)) + (m >> u64(32))) & u64(LOW32))
        if at > 0:
            one += u64(totals[2 * block])
            two += u64(totals[2 * block + 1])
        totals[2 * block] = i64(one)
        totals[2 * block + 1] = i64(two)
        done += size
