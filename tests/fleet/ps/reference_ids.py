"""The oracles of the small kernels, in numpy: initial values, distinct keys, sums of gradients, and places of keys."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fleet.ps.table.hash import GOLDEN, MIX_2, Uint64s, mix, mix_int
from fleet.ps.table.layout import Float32s, Int64s

_MASK = 2**64 - 1


def sub_shard_of(hashes: Uint64s) -> Int64s:
    """Returns the sub-shard, 0 to 63, of each hash."""
    return ((hashes >> np.uint64(46)) & np.uint64(63)).astype(np.int64)


def place_of(hashes: Uint64s) -> Int64s:
    """Returns the 32-bit place inside the sub-shard of each hash."""
    return ((hashes >> np.uint64(14)) & np.uint64(0xFFFFFFFF)).astype(np.int64)


def uniform_bits(seed: int, keys: Int64s, column: int, draw: int = 0) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) per key: 53 bits of a hash of (seed, key, column, draw)."""
    base = mix(keys.astype(np.uint64) ^ np.uint64(mix_int(seed + GOLDEN)))
    counter = np.uint64(((column + 1) * GOLDEN + draw * MIX_2) & _MASK)
    return (mix(base + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(seed: int, key: int, column: int, draw: int) -> float:
    keys = np.array([key], np.int64)
    u1 = float(uniform_bits(seed, keys, column, 2 * draw)[0])
    u2 = float(uniform_bits(seed, keys, column, 2 * draw + 1)[0])
    return math.sqrt(-2.0 * math.log(1.0 - u1)) * math.cos(2.0 * math.pi * u2)


def initial_values(kind: int, a: float, b: float, seed: int, keys: Int64s, start: int, stop: int) -> Float32s:
    """Returns the initial weights [len(keys), stop - start] of columns ``start`` to ``stop``.

    ``kind`` as in :data:`fleet.ps.table.initializers.KINDS`: 0 constant a, 1 uniform [a, b), 2 normal(a, b), 3 the same
    cut at two deviations (Box-Muller, redrawn until it fits).
    """
    out = np.empty((len(keys), stop - start), np.float32)
    for column in range(start, stop):
        if kind == 0:
            out[:, column - start] = a
        elif kind == 1:
            out[:, column - start] = a + (b - a) * uniform_bits(seed, keys, column)
        else:
            for i, key in enumerate(keys.tolist()):
                draw, value = 0, _normal(seed, key, column, 0)
                while kind == 3 and abs(value) > 2.0:
                    draw += 1
                    value = _normal(seed, key, column, draw)
                out[i, column - start] = a + b * value
    return out


def unique_keys(keys: Int64s) -> tuple[Int64s, npt.NDArray[np.int32]]:
    """Returns the distinct keys in order of first appearance, and for each input key its place among them."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return np.ascontiguousarray(keys[np.sort(first)]), rank[inverse.reshape(-1)]


def sum_rows(gradients: Float32s, inverse: npt.NDArray[np.int32], num_unique: int) -> Float32s:
    """Returns the sum of the gradient rows of each distinct key, [num_unique, dim], added in input order."""
    out = np.zeros((num_unique, gradients.shape[1]), np.float32)
    np.add.at(out, inverse, gradients)
    return out
