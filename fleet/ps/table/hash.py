"""The hash that places keys: on servers, in parts of a file, in the sub-shards and the index of a table.

A key's 64 hash bits are read from the top: 12 bits name its virtual range (which server, which part of a file), the
next 6 its sub-shard (which lock), the next 32 its place in the sub-shard's index. Files and running jobs depend on it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleet.ps.table.layout import Int64s

Uint64s = npt.NDArray[np.uint64]

NUM_SUB_SHARDS = 64
NUM_RANGES = 4096
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53  # murmur3's
_MASK = 2**64 - 1


def mix_int(value: int) -> int:
    """Returns the 64 mixed bits of one integer (murmur3's finalizer, a bijection)."""
    value &= _MASK
    value = ((value ^ (value >> 33)) * MIX_1) & _MASK
    value = ((value ^ (value >> 33)) * MIX_2) & _MASK
    return value ^ (value >> 33)


def mix(values: Int64s | Uint64s) -> Uint64s:
    """Returns the mixed bits of each value, elementwise :func:`mix_int`."""
    h = values.astype(np.uint64)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(MIX_1)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(MIX_2)
    return h ^ (h >> np.uint64(33))


def range_of(hashes: Uint64s) -> Int64s:
    """Returns the virtual range, 0 to 4095, of each hash."""
    return (hashes >> np.uint64(52)).astype(np.int64)
