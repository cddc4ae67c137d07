"""ItemVectors: the vectors of an index at one moment, and the search among them.

[Note: Changes beside a base]
Most vectors are in the base: arrays that are never changed, and perhaps lists of faiss. A change leaves the base as it
is, with a mask: the item is dead there, and its new vector is among the recent ones, which are compared one by one. So
a change costs what it changes, a search in another thread sees one whole state, and an approximate base is never asked
for a vector that it was not trained on. When an eighth of a base has changed, a new one is due.

[Note: Scores]
A matrix product finds candidates; its last bits depend on the place of a row. So candidates are all rows within the
error of the product, and their scores are computed again one by one, in float64. A score depends on the item and the
query alone, not on the kind of the index or on its history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.ps.table.layout import Float32s, Int64s

Mask = NDArray[np.bool_]
Answer = tuple[Int64s, Float32s]
NO_ITEM = -1  # in place of ids where there are fewer than k items
_DUE_PART = 8
_FEWEST_DUE = 4096
_MOST_SCORES = 1 << 24  # that are in memory at once


class Approximate(Protocol):
    """A structure that finds most of the nearest vectors without comparing all."""

    def nearest(self, queries: Float32s, k: int, live: Mask) -> Iterator[Int64s]:
        """Yields for each query up to ``k`` places of vectors that ``live`` allows."""


Build = Callable[[Float32s], "Approximate | None"]


@dataclass(frozen=True, slots=True)
class _Block:
    ids: Int64s  # ascending
    vectors: Float32s
    longest: float = 0.0

    def has(self, ids: Int64s) -> Mask:
        """Returns which of its items are among ``ids``."""
        mask = np.zeros(len(self.ids), np.bool_)
        if len(self.ids):
            places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
            mask[places[self.ids[places] == ids]] = True
        return mask

    def changed(self, gone: Mask, ids: Int64s, vectors: Float32s) -> _Block:
        """Returns this block without the items of ``gone``, and with others."""
        every = np.concatenate([self.ids[~gone], ids])
        order = np.argsort(every)
        ordered = np.concatenate([self.vectors[~gone], vectors])[order]
        longest = float(np.einsum("nd,nd->n", ordered, ordered).max(initial=0.0) ** 0.5)
        return _Block(every[order], ordered, longest)

    def nearest(self, live: Mask, queries: Float32s, k: int) -> Iterator[Int64s]:
        """Yields for each query the places of the ``k`` largest products, and of all that rounding may exchange."""
        k = min(k, int(live.sum()))
        if not k:
            yield from [np.empty(0, np.int64)] * len(queries)
            return
        error = 4 * self.vectors.shape[1] * float(np.finfo(np.float32).eps) * self.longest
        margins = error * np.linalg.norm(queries, axis=1)
        step = max(1, _MOST_SCORES // len(self.ids))
        for start in range(0, len(queries), step):
            products = queries[start : start + step] @ self.vectors.T
            if not live.all():
                products[:, ~live] = -np.inf
            last = len(self.ids) - k
            limits = np.partition(products, last, axis=1)[:, last] - margins[start : start + step]
            for row, limit in zip(products, limits, strict=True):
                yield np.flatnonzero(row >= limit)


class ItemVectors:
    """Never changed once it is made, so any thread may search it.

    Args:
        dim: columns of a vector.
    """

    __slots__ = ("_approximate", "_base", "_live", "_recent", "dim")

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._base = _Block(np.empty(0, np.int64), np.empty((0, dim), np.float32))
        self._recent = self._base
        self._live: Mask = np.empty(0, np.bool_)
        self._approximate: Approximate | None = None

    def __len__(self) -> int:
        return int(self._live.sum()) + len(self._recent.ids)

    @property
    def is_due(self) -> bool:
        """Whether enough has changed for a new base."""
        changed = len(self._live) - int(self._live.sum()) + len(self._recent.ids)
        return changed > max(_FEWEST_DUE, len(self._live) // _DUE_PART)

    def applied(self, ids: Int64s, vectors: Float32s, deleted: Int64s) -> ItemVectors:
        """Returns these items after a change: ``ids``, ascending, have ``vectors``, and ``deleted`` are no more."""
        after = ItemVectors(self.dim)
        after._base, after._approximate = self._base, self._approximate
        touched = np.concatenate([ids, deleted])
        after._live = self._live & ~self._base.has(touched)
        after._recent = self._recent.changed(self._recent.has(touched), ids, vectors)
        return after

    def rebuilt(self, build: Build) -> ItemVectors:
        """Returns the same items in a new base; ``build`` gets its vectors."""
        after = ItemVectors(self.dim)
        after._base = self._base.changed(~self._live, self._recent.ids, self._recent.vectors)
        after._live = np.ones(len(after._base.ids), np.bool_)
        after._approximate = build(after._base.vectors)
        return after

    def search(self, queries: Float32s, k: int, *, exact: bool = False) -> Answer:
        """Returns ids and scores [n, k] of the largest inner products, in descending order; ``exact``: of all items."""
        ids = np.full((len(queries), k), NO_ITEM, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        recent = self._recent.nearest(np.ones(len(self._recent.ids), np.bool_), queries, k)
        if self._approximate is None or exact:
            based = self._base.nearest(self._live, queries, k)
        else:
            based = self._approximate.nearest(queries, k, self._live)
        for number, places in enumerate(zip(based, recent, strict=True)):
            found = [
                (block.ids[at], _scores(block.vectors[at], queries[number]))
                for block, at in zip((self._base, self._recent), places, strict=True)
            ]
            near, score = (np.concatenate(part) for part in zip(*found, strict=True))
            order = np.lexsort((near, -score))[:k]  # of equal scores the smaller id first
            ids[number, : len(order)] = near[order]
            scores[number, : len(order)] = score[order]
        return ids, scores


def _scores(vectors: Float32s, query: Float32s) -> Float32s:
    # Sums over the last axis go row by row: a row gives the same bits beside any others.
    scores: Float32s = (vectors.astype(np.float64) * query).sum(axis=1).astype(np.float32)
    return scores
