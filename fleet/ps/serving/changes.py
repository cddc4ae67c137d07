"""Changes: how the rows of a table differ between two states of a Reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.ps.serving.local_rows import LocalState, RowIndex
from fleet.ps.table.layout import Float32s, Int64s

_BLOCK = 1 << 18  # ids that are compared at once


@dataclass(frozen=True, slots=True)
class Changes:
    """What :meth:`fleet.ps.Reader.changes` found. Every id is in ``ids`` or in ``deleted`` at most once.

    Attributes:
        ids: int64 [n], ascending: ids that were added, and those whose row has other bits than before.
        rows: float32 [n, dim]: their rows now.
        deleted: int64 [m], ascending: ids that had a row before, and have none now.
        state: the rows that these changes lead to; pass it as ``since`` to the next call.
    """

    ids: Int64s
    rows: Float32s
    deleted: Int64s
    state: LocalState = field(repr=False)


def changes_between(table: str, before: LocalState, now: LocalState) -> Changes:
    """Returns the changes of ``table`` from ``before``, which may lack the table, to ``now``, which has it.

    States whose files continue each other cost the files after the first one; others, such as a base that was
    compacted, a save that was replaced, or a way back to older rows, cost a comparison of all rows.
    """
    ids, rows, deleted = [], [np.empty((0, now.dims[table]), np.float32)], []
    candidates = _candidates(table, before, now)
    for start in range(0, len(candidates), _BLOCK):
        keys = candidates[start : start + _BLOCK]
        newer, is_now = now.lookup(table, keys)
        changed, was = is_now, np.zeros(len(keys), np.bool_)
        if table in before.dims:
            older, was = before.lookup(table, keys)
            changed = is_now & (~was | _differ(newer, older))
        ids.append(keys[changed])
        rows.append(newer[changed])
        deleted.append(keys[was & ~is_now])
    return Changes(_joined(ids), np.concatenate(rows), _joined(deleted), now)


def _candidates(table: str, before: LocalState, now: LocalState) -> Int64s:
    """Returns the ids, ascending, that are in an index of one of the states which the other has not."""
    indexes = [{id(index): index for index in _indexes(table, state)} for state in (before, now)]
    apart = indexes[0].keys() ^ indexes[1].keys()
    both = indexes[0] | indexes[1]
    return np.unique(_joined([both[key].keys for key in apart]))


def _indexes(table: str, state: LocalState) -> Iterator[RowIndex]:
    for (name, _), share in state.shares.items():
        if name == table:
            yield from share.indexes


def _differ(rows: Float32s, others: Float32s) -> NDArray[np.bool_]:
    # As bits: a NaN is then equal to itself, and not a change for ever.
    different: NDArray[np.bool_] = (rows.view(np.uint32) != others.view(np.uint32)).any(axis=1)
    return different


def _joined(parts: list[Int64s]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *parts])
