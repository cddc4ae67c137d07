"""Stage 1: who owns which parameter (A.10, V1 partition)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.strategies._sharding_owners import plan_owners


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_largest_first_to_the_lightest(sizes: list[int], degree: int) -> None:
    """A.10: sorted by size, the largest first, each to the worker with least; the written-out loop."""
    loads = [0] * degree
    expected = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        expected[place] = loads.index(min(loads))
        loads[expected[place]] += sizes[place]
    assert plan_owners(sizes, degree) == expected
    assert not sizes or max(loads) - min(loads) <= max(sizes)


def test_later_parameters_go_where_there_is_room() -> None:
    """What is owned already counts."""
    assert plan_owners([5, 5], 2, [0, 100]) == [0, 0]
