"""Ids of 64 bits that look like hashes: half of them are negative, and none follow each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KINDS = {"user": 1, "item": 2, "category": 3, "brand": 4}


def ids_of(kind: str, count: int) -> NDArray[np.int64]:
    """Returns ids 0 to ``count`` - 1 of a kind, int64 [count]; no two kinds share one.

    The finalizer of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014) maps the
    64-bit numbers onto themselves, so no two ids are equal.

    Example:
        >>> ids_of("item", 2).tolist()
        [3328216358160442104, -4434225592703713217]
    """
    value = np.arange(count, dtype=np.uint64) + np.uint64(KINDS[kind] << 56)
    value *= np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value.view(np.int64)
