# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The kernel of :mod:`fleet.ps.wire.body_digest`."""

from __future__ import annotations

from fleet.ps.table.kernels.common import LOW32, i64, kernel, u64, words

LANES = 512


@kernel
def add_lanes(data, count, first, key, sums):
    """Adds ``count`` lanes of 8 bytes, the first of which is number ``first`` of its body, to the sums of their blocks.

    Block b has the sums 2b and 2b + 1, which its first lane sets; the key of the second is that of the first, one
    lane on.
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
        totals[2 * block], totals[2 * block + 1] = i64(one), i64(two)
        done += size
