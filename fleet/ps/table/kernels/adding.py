# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Kernels of the rarer requests: add (geo) and contains; see :mod:`fleet.ps.table.kernels.row_requests`."""

from __future__ import annotations

from fleet.ps.table.kernels.common import (
    GROUP,
    HAS_EMBEDX,
    LOW32,
    NUM_BLOCKS,
    NUM_WEIGHTS,
    SUB_SHARDS,
    SUB_WORDS,
    call_group,
    floats,
    i64,
    ints,
    kernel,
    none,
    octets,
    part,
    words,
)
from fleet.ps.table.kernels.finding import HASHES, order_in, slots_in
from fleet.ps.table.kernels.index import find
from fleet.ps.table.kernels.row_kernels import ADD, FIND_ONLY, initialise_state, row_at
from fleet.ps.table.kernels.row_requests import LINE_BYTES, hold, let_go, span_of

_EMBEDX_BIT = -(2**63)


@part(none(i64, i64, i64, i64, i64))
def add_shard(table, scratch, n, s, deltas):
    """Adds deltas to the found rows of one sub-shard."""
    sub, width = words(table)[SUB_SHARDS] + 8 * SUB_WORDS * s, words(table)[NUM_WEIGHTS]
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
    header, status, first = words(table), 0, 0
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
