"""The mesh: degrees from the options, and groups along each axis."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleet
from fleet.strategies._shared.mesh import plan_axes, plan_axis_groups


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_groups_along_an_axis(sizes: list[int], data: st.DataObject) -> None:
    """G9: ranks count with the last axis fastest; a group differs in its own axis only."""
    degrees = {f"axis{place}": size for place, size in enumerate(sizes)}
    axis = data.draw(st.sampled_from(list(degrees)))
    places = list(itertools.product(*(range(size) for size in sizes)))
    own = list(degrees).index(axis)
    groups = plan_axis_groups(degrees, axis)
    assert sorted(rank for group in groups for rank in group) == list(range(len(places)))
    for group in groups:
        assert [places[rank][own] for rank in group] == list(range(sizes[own]))
        assert len({places[rank][:own] + places[rank][own + 1 :] for rank in group}) == 1


def test_degrees_of_the_options() -> None:
    """G10: -1 is what the others leave; sharding_configs counts when sharding is on; the order is the option's."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"sharding_degree": 2}
    assert plan_axes(strategy, 8) == {"dp": 4, "pp": 1, "sharding": 2, "sep": 1, "cp": 1, "mp": 1}
    strategy.hybrid_parallel_order = ["sharding", "dp", "pp", "sep", "mp"]
    assert list(plan_axes(strategy, 8)) == ["sharding", "dp", "pp", "sep", "mp", "cp"]
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": 4, "dp_degree": 2}
    assert (plan_axes(strategy, 8)["dp"], plan_axes(strategy, 8)["sharding"]) == (2, 4)
    with pytest.raises(fleet.errors.ConfigError, match="sharding_degree=4"):
        plan_axes(strategy, 4)
