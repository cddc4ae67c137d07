"""explain() says how the workers lie, what they send, and how long stages wait (surface sections 7.2 and 16)."""

from __future__ import annotations

import io

import fleet
from fleet.options.explain import explain
from fleet.options.explain_mesh import mesh_lines


def strategy_of(**degrees: int) -> fleet.DistributedStrategy:
    """Returns options with these degrees."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    return strategy


def test_who_holds_what() -> None:
    """8 workers, dp 2 x pp 2 x mp 2: the neighbours of the order dp, pp, mp, and ring factors 2 (k-1)/k."""
    strategy = strategy_of(mp=2, pp=2)
    strategy.pipeline_configs = {"accumulate_steps": 8}
    text = explain(strategy, 8, file=io.StringIO())
    assert "Mesh: dp 2 x pp 2 x mp 2; 2 groups of 4 workers train on different rows" in text
    assert "dp 2 (ranks 0,4 | 1,5 | 2,6 | 3,7)" in text
    assert "pp 2 (ranks 0,2 | 1,3 | 4,6 | 5,7)" in text
    assert "mp 2 (ranks 0,1 | 2,3 | 4,5 | 6,7)" in text
    assert "1 x P x 4 bytes / 4" in text
    assert "= 11.1% of a step with p = 2 stages, n = 8 micro-batches" in text
    assert "min(p - s, n) micro-batches, at most 2" in text


def test_bubbles() -> None:
    """(p-1)/(n+p-1); the recorded value for p = 4, n = 8 is 0.273."""
    strategy = strategy_of(pp=4)
    strategy.pipeline_configs = {"accumulate_steps": 8, "schedule_mode": "F-then-B"}
    [line] = [line for line in mesh_lines(strategy, 4) if "bubble" in line]
    assert "27.3%" in line
    assert "all 8" in line


def test_experts() -> None:
    """Experts lie along a second grid over the workers of sharding and mp, which is named too."""
    text = "\n".join(mesh_lines(strategy_of(ep=2, moe_sharding=2, sharding=4), 4))
    assert "ep 2 (ranks 0,1 | 2,3): hold different experts" in text
    assert "moe_sharding 2 (ranks 0,2 | 1,3): hold the same experts" in text
    assert "a worker sends for each layer of experts, the tokens" in text


def test_nothing_to_say() -> None:
    """Data parallelism has no mesh to explain, and degrees that do not fit are explained as a problem."""
    assert mesh_lines(fleet.DistributedStrategy(), 4) == []
    assert mesh_lines(strategy_of(mp=3), 4) == []
    assert len(mesh_lines(strategy_of(mp=8), 64)[-1]) > 0
    assert "| ..." in "\n".join(mesh_lines(strategy_of(mp=8), 64))
