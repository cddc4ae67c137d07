"""The mean of the gradients of all workers in a step of sync mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.ps.table.ids import sum_joined
from fleet.ps.wire.messages import Members, TablePart, tables_of


@dataclass(slots=True)
class MeanPart(TablePart):
    """The mean of dense parts, which has no rows: the table makes it while it applies it."""

    gradients: Sequence[NDArray[np.float32]] = ()
    divisor: int = 1


def merge_parts(parts: Sequence[TablePart], divisor: int, with_shows: bool = False) -> TablePart:
    """Returns the mean of the parts of all workers, of dense ones a :class:`MeanPart`; no row counts as zero.

    The float32 sums run in the order of ``parts``, so the result depends only on that order.

    Args:
        parts: of one dense table, or of sparse ones of the same width, in any order and composition; rows are float32.
        divisor: the number of workers; the sum of the rows is divided by it.
        with_shows: the table keeps statistics: shows (1 where absent) and clicks are summed, not averaged, as one
            process would count them for the whole batch.
    """
    first = parts[0]
    if first.ids is not None:
        return _mean_of_rows(parts, divisor, with_shows)
    every = [part.rows.reshape(-1) for part in parts if part.rows is not None]
    return MeanPart(first.table_id, first.n, 1, gradients=every, divisor=divisor)


def _mean_of_rows(parts: Sequence[TablePart], divisor: int, with_shows: bool) -> TablePart:
    dim = parts[0].dim
    ids = np.concatenate([part.ids for part in parts if part.ids is not None])
    rows = np.concatenate([part.rows for part in parts if part.rows is not None])
    owners = np.concatenate([_owners(part) for part in parts])
    # By table; the keys of one keep their order, so its sums are the same in whatever company it comes.
    order = np.argsort(owners, kind="stable")
    tables, firsts = np.unique(owners[order], return_index=True)
    if not len(tables):
        return TablePart(parts[0].table_id, 0, dim, ids, rows)
    (keys, ends), rows, places = sum_joined(ids[order], np.append(firsts[1:], len(ids)), rows[order])
    inverse = np.empty_like(places)
    inverse[order] = places
    rows /= np.float32(divisor)
    merged = TablePart(int(tables[0]), len(keys), dim, keys, rows)
    _add_statistics(merged, parts, inverse, with_shows)
    if len(tables) > 1:
        merged.members = Members(tuple(tables.tolist()), ends)
    return merged


def _add_statistics(
    merged: TablePart, parts: Sequence[TablePart], inverse: NDArray[np.int32], with_shows: bool
) -> None:
    """Adds shows, clicks and slots of ``parts``; ``inverse`` has the place of each of their rows in ``merged``."""
    with_shows = with_shows or any(part.shows is not None or part.clicks is not None for part in parts)
    shows, clicks = np.zeros((2, merged.n if with_shows else 0), np.float32)
    slots = np.zeros(merged.n, np.uint32) if any(part.slots is not None for part in parts) else None
    start = 0
    for part in parts if with_shows or slots is not None else ():
        places = inverse[start : start + part.n]
        start += part.n
        if with_shows:
            # Not shows[places] += ...: an id that occurs twice in a part would count once.
            np.add.at(shows, places, np.float32(1) if part.shows is None else part.shows)
            if part.clicks is not None:
                np.add.at(clicks, places, part.clicks)
        if slots is not None and part.slots is not None:
            slots[places] = part.slots
    merged.slots = slots
    if with_shows:
        merged.shows = shows
        merged.clicks = clicks


def parts_alike(parts: Sequence[TablePart], keeps_shows: Callable[[int], bool]) -> list[list[TablePart]]:
    """Returns the parts that :func:`merge_parts` takes at once: of one dense table, or of sparse ones of one kind.

    A table whose parts hold shows, clicks or slots on any worker does not come with one whose parts hold none.

    Args:
        parts: of all workers, in the order in which they are added up.
        keeps_shows: whether a table keeps statistics.
    """
    shown = set(tables_of(part for part in parts if part.shows is not None or part.clicks is not None))
    slotted = set(tables_of(part for part in parts if part.slots is not None))

    def kind(part: TablePart, table_id: int) -> tuple[int, ...]:
        if part.ids is None:
            return (table_id,)
        return part.dim, keeps_shows(table_id), table_id in shown, table_id in slotted

    found: dict[tuple[int, ...], list[TablePart]] = {}
    for part in parts:
        kinds = {kind(part, table_id) for table_id in part.table_ids}
        for one in [part] if len(kinds) == 1 else part.each():
            found.setdefault(kind(one, one.table_id), []).append(one)
    return list(found.values())


def _owners(part: TablePart) -> NDArray[np.uint16]:
    """Returns the table of each row; sorting 16 bits is sorting by radix."""
    sizes = [part.n] if part.members is None else np.diff(part.members.ends, prepend=0)
    return np.repeat(np.array(part.table_ids, np.uint16), sizes)
