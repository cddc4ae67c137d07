"""Where a list of layers is cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.strategies.pipeline.cut import Method, plan_cut, plan_cut_by_size

A, B = "A", "Block"


@pytest.mark.parametrize(
    ("names", "parts", "method", "cut"),
    [
        ([A] * 5, 2, "uniform", [0, 2, 5]),
        ([A] * 7, 2, "uniform", [0, 3, 7]),
        ([A] * 8, 3, "uniform", [0, 2, 5, 8]),
        ([A] * 10, 4, "uniform", [0, 2, 4, 7, 10]),
        ([A] * 11, 4, "uniform", [0, 2, 5, 8, 11]),
        ([A] * 12, 5, "uniform", [0, 2, 4, 6, 9, 12]),
        ([A] * 26, 4, "uniform", [0, 6, 12, 19, 26]),
        ([A, B, B, B, B, A, A], 2, "layer:Block", [0, 3, 7]),
        ([A, *[B] * 8, A, A], 4, "layer:block", [0, 3, 5, 7, 11]),
        ([A, *[B] * 6, A, A], 3, "layer:B.*k", [0, 3, 5, 9]),
        ([A] * 8, 3, [0, 2, 5], [0, 2, 5, 8]),
        ([A] * 8, 3, [0, 2, 5, 8], [0, 2, 5, 8]),
    ],
)
def test_cuts_are_those_of_paddle(names: list[str], parts: int, method: Method, cut: list[int]) -> None:
    """Section 6, seg_method; recorded with Paddle 3.3.1."""
    assert plan_cut(names, parts, method) == cut


def test_wrong_cuts_are_refused() -> None:
    """Section 6: fewer layers than stages; names that do not divide; boundaries that do not rise."""
    with pytest.raises(ValueError, match="3 layers for 4 parts"):
        plan_cut([A] * 3, 4)
    with pytest.raises(ValueError, match="must fit a multiple of 2"):
        plan_cut([A, B, B, B], 2, "layer:Block")
    with pytest.raises(ValueError, match="no regular expression"):
        plan_cut([A, B], 2, "layer:(")
    with pytest.raises(ValueError, match="it is 'uniform', 'layer:'"):
        plan_cut([A, B], 2, "even")
    for wrong in ([0, 3, 3], [1, 2, 3], [0, 5], [0, 2, 2, 4], [0, True, 2]):
        with pytest.raises(ValueError, match="rising from 0"):
            plan_cut([A] * 4, 3, wrong)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_largest_part_is_as_small_as_can_be(sizes: list[int], parts: int) -> None:
    """pipeline_configs['split'] = 'auto' against every possible cut."""
    if parts > len(sizes):
        with pytest.raises(ValueError, match="each needs one"):
            plan_cut_by_size(sizes, parts)
        return
    cut = plan_cut_by_size(sizes, parts)
    assert (cut[0], cut[-1], len(cut)) == (0, len(sizes), parts + 1)
    assert all(a < b for a, b in pairwise(cut))
    every = [(0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), parts - 1)]
    assert max(sum(sizes[a:b]) for a, b in pairwise(cut)) == min(
        max(sum(sizes[a:b]) for a, b in pairwise(other)) for other in every
    )
