"""Sums of gradients: within one worker by id, and over workers in the order of their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.ps.client.shards import Gradient
from fleet.ps.wire.messages import Part

__all__ = ["merge_gradients", "merge_parts", "sum_by_id"]

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]


def sum_by_id(ids: Keys, rows: Rows) -> tuple[Keys, Rows]:
    """Returns the sorted distinct ids and, for each, the float32 sum of its rows in the order they stand.

    Example:
        >>> sum_by_id(np.array([7, 3, 7]), np.array([[1.0], [2.0], [4.0]], np.float32))
        (array([3, 7]), array([[2.],
               [5.]], dtype=float32))
    """
    order = np.argsort(ids, kind="stable")
    sorted_ids = ids[order]
    first = np.ones(len(ids), np.bool_)
    first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    if first.all():
        return sorted_ids, rows[order]
    starts = np.flatnonzero(first)
    distinct = sorted_ids[starts]
    total = rows[order[starts]]
    counts = np.diff(starts, append=len(ids))
    for extra in range(1, int(counts.max())):  # one pass per repetition: plain sums from left to right
        places = np.flatnonzero(counts > extra)
        total[places] += rows[order[starts[places] + extra]]
        if len(places) * 8 < len(starts) and extra > 32:
            _add_rest(total, rows, order, starts[places], counts[places], places, extra + 1)
            break
    return distinct, total


def _add_rest(total: Rows, rows: Rows, order: Keys, starts: Keys, counts: Keys, places: Keys, done: int) -> None:
    for start, count, place in zip(starts.tolist(), counts.tolist(), places.tolist(), strict=True):
        rest = rows[order[start + done : start + count]]
        if len(rest):
            total[place] = np.add.accumulate(np.concatenate((total[place][None], rest)), axis=0)[-1]


def merge_parts(parts: Sequence[Part], divisor: int, with_shows: bool = False) -> Part:
    """Returns the one part that stands for one part per worker; a worker that lacks an id counts as zero.

    The float32 sums run in the order of ``parts``, so the result depends on that order alone.

    Args:
        parts: of one table, all sparse or all dense; rows are float32.
        divisor: the number of workers; the sum of the rows is divided by it.
        with_shows: the table keeps statistics: shows (1 where absent) and clicks are summed, not averaged, as one
            process would count them for the whole batch.
    """
    scale = np.float32(divisor)
    first = parts[0]
    if first.ids is None:
        total = np.zeros((first.n, 1), np.float32)
        for part in parts:
            assert part.rows is not None
            total += part.rows
        total /= scale
        return Part(first.table_id, first.n, 1, rows=total)
    every = np.concatenate([part.ids for part in parts if part.ids is not None])
    keys, inverse = np.unique(every, return_inverse=True)
    inverse = inverse.reshape(-1)
    rows = np.zeros((len(keys), first.dim), np.float32)
    shows, clicks = np.zeros(len(keys), np.float32), np.zeros(len(keys), np.float32)
    with_shows = with_shows or any(part.shows is not None or part.clicks is not None for part in parts)
    slots = np.zeros(len(keys), np.uint32) if any(part.slots is not None for part in parts) else None
    start = 0
    for part in parts:
        places = inverse[start : start + part.n]
        start += part.n
        assert part.rows is not None
        if part.n and np.bincount(places).max() > 1:
            np.add.at(rows, places, part.rows)
        else:
            rows[places] += part.rows
        if with_shows:
            np.add.at(shows, places, np.float32(1) if part.shows is None else part.shows)
            if part.clicks is not None:
                np.add.at(clicks, places, part.clicks)
        if slots is not None and part.slots is not None:
            slots[places] = part.slots
    rows /= scale
    if not with_shows:
        return Part(first.table_id, len(keys), first.dim, keys, rows, slots=slots)
    return Part(first.table_id, len(keys), first.dim, keys, rows, shows, clicks, slots)


def merge_gradients(gradients: Sequence[Gradient], with_shows: bool = False) -> Gradient:
    """Returns one gradient with distinct ids: rows, shows and clicks of equal ids summed in the order given.

    Args:
        gradients: of one table; ids may repeat within one as well.
        with_shows: the table keeps statistics: absent shows count 1 per appearance.
    """
    with_shows = with_shows or any(item.shows is not None or item.clicks is not None for item in gradients)
    ids = np.concatenate([item.ids for item in gradients])
    rows = np.concatenate([item.rows for item in gradients])
    if not with_shows:
        slots = _slots(gradients)
        distinct, total = sum_by_id(ids, rows)
        return Gradient(distinct, total, slots=None if slots is None else _last_of(ids, slots, distinct))
    shows = np.concatenate([_or_constant(item.shows, len(item.ids), 1) for item in gradients])
    clicks = np.concatenate([_or_constant(item.clicks, len(item.ids), 0) for item in gradients])
    distinct, total = sum_by_id(ids, np.concatenate((rows, shows[:, None], clicks[:, None]), axis=1))
    merged = Gradient(
        distinct,
        np.ascontiguousarray(total[:, :-2]),
        np.ascontiguousarray(total[:, -2]),
        np.ascontiguousarray(total[:, -1]),
    )
    slots = _slots(gradients)
    merged.slots = None if slots is None else _last_of(ids, slots, distinct)
    return merged


def _or_constant(values: Rows | None, n: int, constant: float) -> Rows:
    return np.full(n, constant, np.float32) if values is None else values


def _slots(gradients: Sequence[Gradient]) -> NDArray[np.uint32] | None:
    if all(item.slots is None for item in gradients):
        return None
    return np.concatenate(
        [np.zeros(len(item.ids), np.uint32) if item.slots is None else item.slots for item in gradients]
    )


def _last_of(ids: Keys, values: NDArray[np.uint32], distinct: Keys) -> NDArray[np.uint32]:
    last = np.empty(len(distinct), np.uint32)
    last[np.searchsorted(distinct, ids)] = values  # of equal places the last value stays
    return last
