"""The options of the pipeline: how many stages they ask for."""

from __future__ import annotations

from fleet.options import DistributedStrategy
from fleet.strategies._shared.mesh import plan_axes


def test_stages_are_an_axis_of_the_mesh() -> None:
    """A.2 hybrid_configs: dp takes what the stages leave; sharding_configs leaves mp and pp to hybrid_configs."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    assert (plan_axes(strategy, 4)["dp"], plan_axes(strategy, 4)["pp"]) == (2, 2)
    strategy.sharding = True
    assert (plan_axes(strategy, 4)["sharding"], plan_axes(strategy, 4)["pp"]) == (2, 2)
