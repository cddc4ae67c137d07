"""The compiled hashes against the same formulas in Python."""

from __future__ import annotations

import numpy as np

from fleet.features.mixing import cross_ids, fold, hash_ids, hash_words

MASK = 2**64 - 1


def mix(x: int) -> int:
    """SplitMix64, as published."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def fnv(word: bytes) -> int:
    """FNV-1a, as published."""
    found = 0xCBF29CE484222325
    for byte in word:
        found = ((found ^ byte) * 0x100000001B3) & MASK
    return found


def test_published_values() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of SplitMix64 with seed 0
    assert fnv(b"a") == 0xAF63DC4C8601EC8C


def test_ids_and_words() -> None:
    keys = np.array([0, 1, 7, -1, 2**63 - 1, -(2**63)], np.int64)
    out = np.empty(len(keys), np.uint64)
    hash_ids(keys.view(np.uint64), np.uint64(5), out)
    assert out.tolist() == [mix((int(key) & MASK) ^ mix(5)) for key in keys]
    words = [b"", b"a", "\u00fc\u4e2d".encode(), bytes(range(256))]
    ends = np.concatenate([[0], np.cumsum([len(word) for word in words])]).astype(np.int64)
    out = np.empty(len(words), np.uint64)
    hash_words(np.frombuffer(b"".join(words), np.uint8), ends, np.uint64(0), out)
    assert out.tolist() == [mix(fnv(word) ^ mix(0)) for word in words]


def test_folding_and_crossing() -> None:
    hashes = np.array([0, 1, MASK, 2**63], np.uint64)
    out = np.empty(4, np.int64)
    fold(hashes, 0, out)
    assert out.tolist() == [0, 1, 2**63 - 1, 0]
    fold(hashes, 10, out)
    assert out.tolist() == [0, 1, MASK % 10, 2**63 % 10]
    pairs = np.empty(2 * 1 + 1 * 3, np.uint64)
    cross_ids(hashes[:3], np.array([0, 2, 3]), hashes, np.array([0, 1, 4]), pairs)
    expected = [(0, 0), (1, 0), (2, 1), (2, 2), (2, 3)]
    assert pairs.tolist() == [mix(mix(int(hashes[i])) ^ int(hashes[j])) for i, j in expected]
