"""The place of a worker on a mesh, and the groups of axes taken together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.job.axes import COPY_AXES, MODEL_AXES, Axes, make_axes
from tests.helpers.workers import run_workers

NAMES = ("dp", "pp", "sharding", "sep", "cp", "mp")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 2), min_size=6, max_size=6), st.permutations(NAMES), st.sets(st.sampled_from(NAMES)))
def test_ranks_against_brute_force(dims: list[int], names: list[str], fused: set[str]) -> None:
    """Workers of one group differ only along its axes, whatever the order of the axes."""
    degrees = dict(zip(names, dims, strict=True))
    places = list(itertools.product(*(range(size) for size in dims)))
    for rank, place in enumerate(places):
        axes = Axes(degrees, rank)
        same = [
            other
            for other, at in enumerate(places)
            if all(a == b for name, a, b in zip(names, place, at, strict=True) if name not in fused)
        ]
        assert list(axes.ranks(*fused)) == same
        assert axes.rank(*fused) == same.index(rank)
        assert axes.size(*fused) == len(same)
        assert axes.coordinate() == dict(zip(names, place, strict=True))


def test_rows_differ_along_dp_and_sharding_only() -> None:
    """Workers of one copy of the model read the same rows."""
    found = [Axes({"dp": 2, "pp": 2, "sharding": 2, "mp": 2}, rank) for rank in range(16)]
    assert {axes.data_replicas for axes in found} == {4}
    by_rank: dict[int, int] = {}
    for axes in found:
        by_rank[axes.data_rank] = by_rank.get(axes.data_rank, 0) + 1
    assert by_rank == {0: 4, 1: 4, 2: 4, 3: 4}
    assert Axes({"dp": 1, "sep": 2}, 1).data_replicas == 1
    assert found[5].described() == "dp 0, pp 1, sharding 0, mp 1"
    assert Axes({"dp": 4, "mp": 1}, 2).described() == ""


def sums(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, Any]:
    """Returns the sum of the ranks over the group of each axis and of the fused ones."""
    axes = make_axes(degrees, rank, dist.group.WORLD, 60.0)
    found: dict[str, Any] = {}
    for names in [(name,) for name in degrees] + [COPY_AXES, MODEL_AXES]:
        group, total = axes.group(*names), torch.tensor(float(rank))
        if group is not None:
            dist.all_reduce(total, group=group)
        found["+".join(names)] = (total.item(), sum(axes.ranks(*names)))
    axes.release()
    with pytest.raises(AssertionError, match="no process group"):
        axes.group("mp")
    return found


@pytest.mark.parametrize("degrees", [{"dp": 2, "pp": 1, "mp": 2}, {"pp": 2, "sharding": 1, "mp": 2}, {"mp": 4}])
def test_groups_hold_the_ranks(degrees: dict[str, int]) -> None:
    """Each group adds up over exactly the workers that the arithmetic names."""
    for found in run_workers(sums, 4, degrees):
        assert all(total == expected for total, expected in found.values())
