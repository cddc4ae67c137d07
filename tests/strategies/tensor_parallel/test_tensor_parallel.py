"""The options of tensor parallelism: which degree they ask for."""

from __future__ import annotations

from fleet.options import DistributedStrategy
from fleet.strategies._shared.mesh import plan_axes


def test_the_switch_takes_its_own_degree() -> None:
    """A.2 tensor_parallel_configs: the degree counts where hybrid_configs names none."""
    strategy = DistributedStrategy()
    strategy.tensor_parallel = True
    strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
    assert plan_axes(strategy, 4)["mp"] == 2
    strategy.tensor_parallel = False
    assert plan_axes(strategy, 4)["mp"] == 1
    strategy.hybrid_configs = {"mp_degree": 4}
    assert plan_axes(strategy, 4)["mp"] == 4
