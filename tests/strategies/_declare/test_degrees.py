"""Degrees of parallelism and the hybrid settings (G9, G10)."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.job.axes import AXES
from fleet.options import DistributedStrategy
from fleet.options.explain import explanation
from fleet.strategies import plan
from fleet.strategies._declare.degrees import plan_degrees
from fleet.strategies._declare.strategy_plan import problems
from fleet.strategies._shared.mesh import plan_axes, plan_expert_axes


def test_dp_takes_what_all_other_degrees_leave() -> None:
    """G10: -1 is computed with sharding, sep and cp too, not with mp and pp alone."""
    degrees = {"dp": -1, "pp": 2, "sharding": 3, "sep": 1, "cp": 1, "mp": 2}
    assert plan_degrees("hybrid_configs", degrees, 24)["dp"] == 2
    assert plan_degrees("hybrid_configs", {"dp": -1, "mp": 1}, 5) == {"dp": 5, "mp": 1}


def test_product_must_be_the_number_of_workers() -> None:
    """A.2 hybrid_configs: the message shows the product and what to change."""
    with pytest.raises(
        ConfigError,
        match=r"^hybrid_configs: dp_degree=2 \* pp_degree=2 is 4, but 8 processes were started. Set dp_degree=4, or "
        r"start 4\.$",
    ):
        plan_degrees("hybrid_configs", {"dp": 2, "pp": 2, "mp": 1}, 8)
    with pytest.raises(ConfigError, match=r"dp_degree=3 is 3, but 1 process was started. Set dp_degree=1, or start 3"):
        plan_degrees("hybrid_configs", {"dp": 3}, 1)
    with pytest.raises(ConfigError, match="does not divide the 4 processes"):
        plan_degrees("hybrid_configs", {"dp": -1, "sharding": 3}, 4)
    with pytest.raises(ConfigError, match="Change the degrees, or start 3"):
        plan_degrees("hybrid_configs", {"dp": 1, "sharding": 3}, 4)


def expert_grid(world_size: int, **degrees: int) -> Any:
    """Returns the degrees of the mesh above 1 and of the expert grid, or why the plan is refused."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    found = problems(strategy, world_size)
    if found:
        return " ".join(str(error) for error in found)
    dense = {axis: degree for axis, degree in plan_axes(strategy, world_size).items() if degree > 1}
    return dense, plan_expert_axes(strategy, world_size)


def test_the_expert_grid() -> None:
    """Surface 1.4: moe_sharding * ep = sharding * mp; cp divides the sharding axis; dp and sep are 1."""
    assert expert_grid(2, sharding=2, ep=2) == ({"sharding": 2}, {"moe_sharding": 1, "ep": 2})
    assert expert_grid(2, mp=2, ep=2) == ({"mp": 2}, {"moe_sharding": 1, "ep": 2})
    assert expert_grid(8, sharding=2, pp=2, mp=2, ep=2, moe_sharding=2)[1] == {"moe_sharding": 2, "ep": 2}
    assert expert_grid(4, sharding=4, cp=2, ep=2, moe_sharding=2)[0] == {"sharding": 2, "cp": 2}
    assert expert_grid(4, sharding=4, cp=2, cp_sharding=2, ep=4)[0] == {"sharding": 2, "cp": 2}
    assert "Set moe_sharding_degree=2" in expert_grid(4, sharding=4, ep=2)
    assert "Choose an ep_degree dividing 4" in expert_grid(4, sharding=4, ep=3)
    assert "Set sharding_degree=2 and dp_degree=1" in expert_grid(2, ep=2)
    assert "sep_degree is 2" in expert_grid(2, sep=2, ep=2)
    assert "must be sharding_degree=4" in expert_grid(4, sharding=4, cp=2, cp_sharding=4, ep=4)
    for key in ("moe_sharding", "cp_sharding"):
        assert "while ['ep_degree'] is 1" in expert_grid(2, **{key: 2})


def test_plain_data_parallel_degrees_plan() -> None:
    """A.2: the quick-start form dp_degree = world, everything else 1."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "mp_degree": 1, "pp_degree": 1}
    assert [step.name for step in plan(strategy, 2).steps] == ["data_parallel"]
    with pytest.raises(ConfigError, match="Set dp_degree=4"):
        plan(strategy, 4)


def planned(world_size: int, hybrid: dict[str, int] | None = None, **sharding: int) -> tuple[int, int] | str:
    """Returns the degrees of dp and sharding, or why the plan is refused."""
    strategy = DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = sharding
    strategy.hybrid_configs = hybrid or {}
    if found := problems(strategy, world_size):
        return str(found[0])
    axes = plan_axes(strategy, world_size)
    return axes["dp"], axes["sharding"]


def test_sharding_without_a_degree_takes_all_workers() -> None:
    """A.2 sharding_configs, decided otherwise: no 8 that nobody wrote, but what the other degrees leave."""
    assert planned(2) == (1, 2)
    assert planned(1) == (1, 1)
    assert planned(8, dp_degree=2) == (2, 4)
    assert planned(8, {"dp_degree": 2}) == (2, 4)
    assert planned(8, {"dp_degree": -1, "sharding_degree": 4}) == (2, 4)
    assert planned(8, {"dp_degree": 2, "sharding_degree": 4}) == (2, 4)
    assert planned(8, {"dp_degree": 2}, sharding_degree=4, dp_degree=2) == (2, 4)
    assert "sharding_degree takes what the other degrees leave" in planned(8, dp_degree=3)
    assert "dp_degree=2 * sharding_degree=2 is 4, but 8" in planned(8, {"dp_degree": 2, "sharding_degree": 2})
    assert "leave the second at -1" in planned(8, {"dp_degree": 4}, dp_degree=2)
    assert "leave), set dp_degree=2, or start 4" in planned(8, sharding_degree=4)
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match="must be -1 or at least 1"):
        strategy.sharding_configs = {"sharding_degree": 0}
    strategy.sharding = True
    assert "sharding_degree=4, which takes all that the other degrees leave" in explanation(strategy, 4)
    strategy.sharding_configs = {"sharding_degree": 4}
    assert "model: sharding_degree=4; stage 1" in explanation(strategy, 4)


def test_an_order_may_leave_out_sep() -> None:
    """A.2 hybrid_configs: scripts of older releases name the four axes that there were."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"order": ["sharding", "dp", "pp", "mp"], "sharding_degree": 2}
    axes = plan_axes(strategy, 4)
    assert list(axes) == ["sharding", "dp", "pp", "mp", "sep", "cp"]
    assert [axes["sharding"], axes["dp"]] == [2, 2]
    strategy.hybrid_parallel_order = ["dp", "sharding", "pp", "mp"]
    for wrong in (["dp", "pp", "mp"], ["dp", "dp", "pp", "sharding", "mp"], ["dp", "pp", "sharding", "mp", "xp"]):
        with pytest.raises(ConfigError, match="'sep', 'cp' may be left out"):
            strategy.hybrid_configs["order"] = wrong


@pytest.mark.parametrize("degree", [0, -2])
def test_dp_degree_is_minus_one_or_positive(degree: int) -> None:
    """Part 2 of the design study: dp_degree = -7 is not accepted."""
    with pytest.raises(ConfigError, match="dp_degree"):
        DistributedStrategy().hybrid_configs = {"dp_degree": degree}


def test_order_is_checked() -> None:
    """A.1 hybrid_parallel_order: the membership check of Paddle never fires; this one does."""
    strategy = DistributedStrategy()
    assert strategy.hybrid_parallel_order == list(AXES)
    strategy.hybrid_parallel_order = ["pp", "dp", "sharding", "sep", "mp"]
    strategy.hybrid_parallel_order = ["sharding", "moe_sharding", "pp", "sep", "dp", "ep", "mp"]
    with pytest.raises(ConfigError, match="'moe_sharding' stands before 'ep'"):
        strategy.hybrid_parallel_order = ["ep", "moe_sharding", *AXES]
    strategy.hybrid_parallel_order = ["pp", "dp", "sharding", "sep", "mp"]
    for wrong in (["dp"], [*AXES, "dp"], ["dp", "pp", "sharding", "sep", "xx"], []):
        with pytest.raises(ConfigError, match="names each of dp, pp"):
            strategy.hybrid_parallel_order = wrong
    assert strategy.hybrid_parallel_order == ["pp", "dp", "sharding", "sep", "mp"]
    with pytest.raises(ConfigError, match="names each of"):
        strategy.hybrid_configs = {"order": ["dp", "dp"]}
    strategy.hybrid_configs = {"order": list(AXES)}
    assert any("Set one of them" in str(error) for error in problems(strategy, 2))


def test_callers_dictionary_is_not_changed() -> None:
    """A0.10: mp_configs and pp_configs stay in the caller's dictionary."""
    given = {"dp_degree": 2, "mp_configs": {"sync_param": False}, "pp_configs": {"delay_scale_loss": True}}
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in given.items()}
    strategy = DistributedStrategy()
    strategy.hybrid_configs = given
    assert given == before
    assert strategy.hybrid_configs["mp_configs"]["sync_param"] is False
    assert strategy.hybrid_configs["mp_configs"]["need_broadcast_data"] is True
