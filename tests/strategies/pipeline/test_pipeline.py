"""The options of the pipeline: how many stages they ask for."""

from __future__ import annotations

import warnings

import pytest

import fleet
from fleet.env import export
from fleet.errors import OptionWarning
from fleet.options import DistributedStrategy
from fleet.options.explain import explanation
from fleet.strategies._shared.mesh import plan_axes
from tests.helpers.workers import run_workers


def test_stages_are_an_axis_of_the_mesh() -> None:
    """A.2 hybrid_configs: dp takes what the stages leave; sharding_configs leaves mp and pp to hybrid_configs."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    assert (plan_axes(strategy, 4)["dp"], plan_axes(strategy, 4)["pp"]) == (2, 2)
    strategy.sharding = True
    assert (plan_axes(strategy, 4)["sharding"], plan_axes(strategy, 4)["pp"]) == (2, 2)


FLAGS = ("FLAGS_p2p_device_synchronize", "PADDLE_P2P_SYNC_SEND")


def warned(rank: int, world_size: int, degrees: dict[str, int], value: str) -> list[str]:
    """Starts a job with both flags; returns its warnings."""
    export(dict.fromkeys(FLAGS, value))
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    return [str(one.message) for one in caught if issubclass(one.category, OptionWarning)]


@pytest.mark.parametrize(
    ("degrees", "value", "expected"), [({"pp": 2}, "1", 2), ({"pp": 2}, "false", 0), ({"dp": 2}, "1", 0)]
)
def test_flags_of_transfers_have_no_effect(degrees: dict[str, int], value: str, expected: int) -> None:
    """7.3: a warning names each flag that is on and says why, where there are stages."""
    for found in run_workers(warned, 2, degrees, value, backend=None, timeout_s=60):
        assert len(found) == expected
        assert all(
            f"{flag} is set in the environment and has no effect" in text
            for flag, text in zip(FLAGS[:expected], found, strict=True)
        )


def test_the_last_bucket_acts_with_an_overlap() -> None:
    """Without one it is said to be of no use."""
    for overlaps in (False, True):
        strategy = DistributedStrategy()
        strategy.hybrid_configs = {"pp_degree": 2, "dp_degree": 2, "pp_configs": {"dp_comm_overlap": overlaps}}
        strategy.last_comm_group_size_MB = 0.5
        assert ("last_comm_group_size_MB" in explanation(strategy, 4)) is not overlaps
