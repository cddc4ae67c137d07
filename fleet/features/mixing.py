# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Compiled loops: hashes of words and of ids, and the crosses of bags. Every operation is on unsigned 64 bits.

The hash of an integer is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); the hash of a word is FNV-1a
of its bytes (Fowler, Noll and Vo), finalized alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from fleet.ps.table.kernels.numba_cache import keep_compiled


def _kernel(function: Callable[..., Any]) -> Any:
    return keep_compiled(njit(nogil=True, error_model="numpy")(function), function)


@_kernel
def _mix(x):
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_kernel
def hash_ids(keys, seed, out):
    """Writes the hash of each key, uint64."""
    start = _mix(seed)
    for i in range(len(keys)):
        out[i] = _mix(np.uint64(keys[i]) ^ start)


@_kernel
def hash_words(data, ends, seed, out):
    """Writes the hash of each word, uint64; word i is ``data[ends[i]:ends[i + 1]]``."""
    start = _mix(seed)
    for i in range(len(out)):
        found = np.uint64(0xCBF29CE484222325)
        for at in range(ends[i], ends[i + 1]):
            found = (found ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
        out[i] = _mix(found ^ start)


@_kernel
def fold(hashes, buckets, out):
    """Writes the ids, int64: below ``buckets``, or with 0 buckets the lowest 63 bits."""
    for i in range(len(hashes)):
        if buckets:
            out[i] = np.int64(hashes[i] % np.uint64(buckets))
        else:
            out[i] = np.int64(hashes[i] & np.uint64(0x7FFFFFFFFFFFFFFF))


@_kernel
def cross_ids(left, left_ends, right, right_ends, out):
    """Writes the hash of each pair of hashes that a row has, uint64; the right one runs faster."""
    at = 0
    for row in range(len(left_ends) - 1):
        for i in range(left_ends[row], left_ends[row + 1]):
            for j in range(right_ends[row], right_ends[row + 1]):
                out[at] = _mix(_mix(left[i]) ^ np.uint64(right[j]))
                at += 1
