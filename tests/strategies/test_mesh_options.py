"""Every option on every axis of the mesh: it trains as one process does, or is refused with the reason (study 5.6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleet.errors import FleetError
from fleet.options import DistributedStrategy
from fleet.strategies import REGISTRY
from fleet.strategies._declare.strategy_plan import problems
from tests.helpers.workers import run_workers
from tests.strategies.mesh_jobs import CASES, NO_SWITCH, SLOW, on_mesh

AXES = ("mp", "pp", "sep", "cp")
LOCAL = {"adaptive_localsgd", "dgc", "localsgd", "reproducible"}
REFUSED = {
    "mp": {*LOCAL, "asp", "qat"},
    "pp": {*LOCAL, "asp", "qat", "gradient_merge"},
    "sep": LOCAL,
    "cp": LOCAL,
}
SWITCHES = sorted(
    name
    for name, strategy in REGISTRY.items()
    if strategy.default is False and name not in ("pipeline", "tensor_parallel")
)


def strategy_on(switch: str, axis: str) -> DistributedStrategy:
    """Returns a strategy with ``switch`` on and ``axis`` of degree 2, for four workers."""
    strategy = DistributedStrategy()
    setattr(strategy, switch, True)
    strategy.update(CASES[switch][0] if switch in CASES else {})
    strategy.hybrid_configs = {f"{axis}_degree": 2}
    return strategy


@pytest.mark.parametrize("axis", AXES)
def test_refused_or_trained(axis: str) -> None:
    """5.6: what is refused on an axis says why; everything else is trained in the tests of this file."""
    for switch in SWITCHES:
        found: list[FleetError] = problems(strategy_on(switch, axis), 4)
        if switch in REFUSED[axis]:
            assert len(found) == 1, (switch, axis)
            assert "hold" in str(found[0]) or "pipeline" in str(found[0]), str(found[0])
        else:
            assert found == [], (switch, axis)
            assert switch in CASES or switch == "sharding", f"{switch} is accepted and not tested"


def compare(cases: dict[str, list[str]], timeout_s: float = 120.0) -> None:
    """Trains with switches by axis, on two replicas of that axis of degree 2, and compares with one worker."""
    switches = list(dict.fromkeys(switch for on in cases.values() for switch in on))
    expected = run_workers(on_mesh, 1, [({}, switches)], timeout_s=timeout_s)[0][0]
    jobs = [({"dp_degree": 2, f"{axis}_degree": 2}, on) for axis, on in cases.items()]
    found = run_workers(on_mesh, 4, jobs, timeout_s=timeout_s)
    for place, (axis, on) in enumerate(cases.items()):
        for switch in on:
            check(f"{switch} along {axis}", CASES[switch][2], axis, [w[place][switch] for w in found], expected[switch])


def check(label: str, tolerance: float, axis: str, workers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Asserts that losses, added up over the workers, and whole weights are those of one worker."""
    copies = 2 if axis == "mp" else 1  # workers that see the same rows
    total = [sum(losses) / copies for losses in zip(*(worker["losses"] for worker in workers), strict=True)]
    assert total == pytest.approx(expected["losses"], rel=tolerance), label
    for name, weight in expected["weights"].items():
        for worker in workers:
            torch.testing.assert_close(
                worker["weights"][name],
                weight,
                atol=tolerance,
                rtol=tolerance,
                msg=lambda text, name=name: f"{label}: {name} {text}",
            )


def trained(axis: str, *, slow: bool = False) -> list[str]:
    """Returns the cases that train on ``axis`` and are quick, or with ``slow`` those that are not."""
    return [case for case in CASES if case not in REFUSED[axis] and (case in SLOW) is slow]


def test_options_train_as_in_one_process() -> None:
    """5.3: losses and weights after four steps are those of one process."""
    along_sep = ["asp", "fp16_allreduce", "gradient_merge", "muon", "sharding stage 3", "sync_batch_norm"]
    compare({"mp": trained("mp"), "sep": along_sep})


@pytest.mark.slow
def test_slow_options_train_as_in_one_process() -> None:
    """The same with those whose start takes long, and along cp."""
    compare({"mp": trained("mp", slow=True), "sep": [*trained("sep", slow=True), *trained("sep")]}, timeout_s=400)
    compare({"cp": trained("cp")}, timeout_s=400)


@pytest.mark.slow
def test_copies_along_two_axes() -> None:
    """3: shards on a mesh with dp and sep, whose copies are one dim of the mesh that is divided over."""
    expected = run_workers(on_mesh, 1, [({}, ["sharding stage 3"])])[0][0]["sharding stage 3"]
    degrees = {"dp_degree": 2, "sharding_degree": 2, "sep_degree": 2}
    found = run_workers(on_mesh, 8, [(degrees, ["sharding stage 3"])], timeout_s=200)
    check("eight workers", 1e-5, "sep", [worker[0]["sharding stage 3"] for worker in found], expected)


def test_cases_are_switches() -> None:
    assert set(CASES) <= {*SWITCHES, *NO_SWITCH}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sharding": True, "sharding_configs": {"stage": 2, "pp_degree": 2}, "pipeline": True}, "gather the param"),
        (
            {"hybrid_configs": {"pp_degree": 2, "sharding_degree": 2, "sharding_configs": {"split_param": True}}},
            "again",
        ),
        (
            {"hybrid_configs": {"pp_degree": 2, "sharding_degree": 2, "sharding_configs": {"accumulate_steps": 2}}},
            "adds up micro-batches already",
        ),
        ({"hybrid_configs": {"pp_configs": {"dp_comm_overlap": True}}}, "pp_degree is 1"),
        ({"hybrid_configs": {"pp_degree": 4, "pp_configs": {"dp_comm_overlap": True}}}, "dp_degree is 1"),
        ({"hybrid_configs": {"pp_degree": 2, "pp_configs": {"sharding_comm_overlap": True}}}, "sharding_degree is 1"),
    ],
)
def test_settings_that_a_pipeline_does_not_take(options: dict[str, Any], expected: str) -> None:
    """1.2, 5.6: stages 2 and 3 and merging in a pipeline; an overlap without what it overlaps."""
    strategy = DistributedStrategy()
    strategy.update(options)
    assert [expected in str(error) for error in problems(strategy, 4)] == [True]
