"""Which workers of a mesh must say the same, and where they do not; every worker comes to the same answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet.checks.comparison import first_difference
from fleet.job.axes import COPY_AXES, Axes


def group_that_differs(said: Sequence[Any], axes: Axes, key: str, *along: str) -> tuple[int, ...]:
    """Returns the first group ``along`` these axes whose workers say different values of ``key``; else ``()``.

    Example:
        >>> said = [{"sum": 1}, {"sum": 1}, {"sum": 2}, {"sum": 3}]
        >>> group_that_differs(said, Axes({"dp": 2, "mp": 2}, 0), "sum", "mp")
        (2, 3)
    """
    for group in axes.all_ranks(*along):
        if len({said[rank][key] for rank in group if said[rank] is not None}) > 1:
            return group
    return ()


def name_that_differs(rows: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]]) -> tuple[str, list[int]]:
    """Returns the first name for which workers of one of ``groups`` hold different values, and that group."""
    for group in groups:
        if name := first_difference([rows[rank] for rank in group]):
            return name, list(group)
    return "", list(groups[0])


def writers(said: Sequence[Any], axes: Axes) -> tuple[list[int], list[int]]:
    """Returns the workers of the copy groups in which some worker wrote, and the other workers."""
    wrote = [group for group in axes.all_ranks(*COPY_AXES) if any(said[rank]["wrote"] for rank in group)]
    ranks = sorted(rank for group in wrote for rank in group)
    return ranks, [rank for rank in range(len(said)) if rank not in ranks]


def same_parts(said: Sequence[Any], axes: Axes, *along: str) -> Iterator[tuple[int, ...]]:
    """Yields the groups ``along`` these axes whose workers hold equal parts, which must be different."""
    for group in axes.all_ranks(*along):
        found = {said[rank]["parts"] for rank in group}
        if len(group) > 1 and len(found) == 1 and "" not in found:
            yield group
