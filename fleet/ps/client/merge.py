"""Sums of the gradients of one worker, by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet.ps.client.shards import Gradient, Keys, Rows
from fleet.ps.table.ids import sum_by_key


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


def with_distinct_ids(gradients: Sequence[Gradient]) -> Gradient:
    """Returns the sum of gradients without shows, clicks and slots, in the order given."""
    if len(gradients) == 1 and gradients[0].distinct:
        return gradients[0]
    if len(gradients) == 1:
        every = gradients[0].ids
        rows = gradients[0].rows
    else:
        every = np.concatenate([one.ids for one in gradients])
        rows = np.concatenate([one.rows for one in gradients])
    return Gradient(*sum_by_key(every, rows)[:2])


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
    last[np.searchsorted(distinct, ids)] = values  # where places repeat, the last value stays
    return last
