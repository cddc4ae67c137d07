# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Compiled loop: rows as the words of an MSET command, as Redis reads them (``$length``, then the bytes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from fleet.ps.table.kernels.numba_cache import keep_compiled

LONGEST_NUMBER = 20  # characters of an id, its sign included
_MINUS, _DIGITS, _LENGTH = np.uint8(45), 48, np.uint8(36)  # "-", "0" and "$"


def _kernel(function: Callable[..., Any]) -> Any:
    return keep_compiled(njit(nogil=True)(function), function)


@_kernel
def _copy(source, out, at):
    for i in range(len(source)):
        out[at + i] = source[i]
    out[at + len(source)] = 13
    out[at + len(source) + 1] = 10
    return at + len(source) + 2


@_kernel
def _text(number, out, end):
    """Writes the number so that it ends before ``end``; returns where it begins."""
    # The two's complement in uint64: -number of the smallest int64 does not fit in int64.
    rest = np.uint64(number)
    if number < 0:
        rest = ~rest + np.uint64(1)
    while True:
        end -= 1
        out[end] = _DIGITS + np.int64(rest % np.uint64(10))
        rest //= np.uint64(10)
        if rest == 0:
            break
    if number < 0:
        end -= 1
        out[end] = _MINUS
    return end


@_kernel
def write_pairs(prefix, keys, rows, out):
    """Writes ``prefix`` and id, and the row, for each id; returns the number of bytes.

    Args:
        prefix: of each key, uint8.
        keys: int64 [n].
        rows: uint8 [n, width].
        out: uint8, with room for ``len(prefix) + width + 64`` bytes a row.
    """
    # Two buffers for all rows: an allocation for each would cost more than the copy.
    name = np.empty(len(prefix) + LONGEST_NUMBER, np.uint8)
    size = np.empty(LONGEST_NUMBER, np.uint8)
    at = np.int64(0)
    for i in range(len(keys)):
        first = _text(keys[i], name, len(name)) - len(prefix)
        name[first : first + len(prefix)] = prefix
        for word in (name[first:], rows[i]):
            out[at] = _LENGTH
            start = _text(np.int64(len(word)), size, len(size))
            at = _copy(size[start:], out, at + 1)
            at = _copy(word, out, at)
    return at
