"""Ids of 64 bits that look like hashes: half of them are negative, and none follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

KINDS = {"user": 1, "item": 2, "category": 3, "brand": 4}


def ids_of(kind: str, count: int) -> NDArray[np.int64]:
    """Returns the ids of the numbers 0 to ``count`` - 1, int64 [count]."""
    return numbered_ids(kind, np.arange(count, dtype=np.int64))


def numbered_ids(kind: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the ids of the numbers 0 to 2**56 - 1 of a kind, int64 of the same shape; no two kinds share one.

    The finalizer of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014) maps the
    64-bit numbers onto themselves, so no two ids are equal.

    Example:
        >>> numbered_ids("item", np.array([0, 1])).tolist()
        [3328216358160442104, -4434225592703713217]
    """
    value = numbers.astype(np.uint64) + np.uint64(KINDS[kind] << 56)
    value *= np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value.view(np.int64)


def text_ids(kind: str, texts: Sequence[str]) -> NDArray[np.int64]:
    """Returns the ids of texts, int64 [texts]; the empty text has id 0: nothing there."""
    found = [blake2b(f"{kind}={text}".encode(), digest_size=8).digest() if text else bytes(8) for text in texts]
    return np.frombuffer(b"".join(found), "<i8").astype(np.int64)
