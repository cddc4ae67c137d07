"""RowIndex: where the row of an id is, for many ids at once, in numpy alone: a serving process need not compile."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet.ps.table.hash import Uint64s, mix
from fleet.ps.table.layout import Int64s

MISSING, GONE = -1, -2  # an id that the index does not know, and one that it knows to be deleted


class RowIndex:
    """The places of distinct ids; never changed once it is made, so any thread may read it.

    Ids lie in the order of their hashes, which are evenly spread: the upper bits of a hash lead to its bucket, which
    holds about one id. It takes 20 bytes an id.

    Args:
        keys: int64 [n]. Of an id that occurs twice the first counts.
        places: int64 [n]; 0 or more, or :data:`GONE`.

    Example:
        >>> index = RowIndex(np.array([7, -3]), np.array([0, 64]))
        >>> ids = np.array([-3, 5])
        >>> index.find(ids, mix(ids)).tolist()
        [64, -1]
    """

    __slots__ = ("_bits", "_starts", "keys", "places")

    def __init__(self, keys: Int64s, places: Int64s) -> None:
        hashes = mix(keys)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        first = np.ones(len(order), np.bool_)
        first[1:] = hashes[1:] != hashes[:-1]  # equal hashes are equal ids
        if not first.all():
            order, hashes = order[first], hashes[first]
        self.keys: Int64s = keys[order]
        self.places: Int64s = places[order]
        self._bits = max(1, (len(order) - 1).bit_length())
        counts = np.bincount((hashes >> np.uint64(64 - self._bits)).astype(np.int64), minlength=1 << self._bits)
        self._starts: NDArray[np.unsignedinteger] = np.zeros(
            len(counts) + 1, np.uint32 if len(order) < 2**32 else np.uint64
        )
        np.cumsum(counts, out=self._starts[1:])

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Int64s, hashes: Uint64s) -> Int64s:
        """Returns the place of each id, int64 [n]; ``hashes`` is ``mix(keys)``."""
        places = np.full(len(keys), MISSING, np.int64)
        if not len(self.keys):
            return places
        buckets = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        at = self._starts[buckets].astype(np.int64)
        ends = self._starts[buckets + 1].astype(np.int64)
        left = np.flatnonzero(at < ends)
        at, ends, wanted = at[left], ends[left], keys[left]
        while len(left):  # as often as the fullest bucket that is asked for has ids
            same = self.keys[at] == wanted
            places[left[same]] = self.places[at[same]]
            on = ~same
            on &= at + 1 < ends
            at, ends, wanted, left = at[on] + 1, ends[on], wanted[on], left[on]
        return places


def merged(newer: RowIndex, older: RowIndex) -> RowIndex:
    """Returns one index of the ids of both; the newer one's place counts."""
    return RowIndex(np.concatenate([newer.keys, older.keys]), np.concatenate([newer.places, older.places]))
