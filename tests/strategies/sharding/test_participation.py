"""Stages 2 and 3 where not every parameter takes part, on all workers or on some: right, or refused before harm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.errors import FleetError
from tests.helpers.checked_training import batch, flat, message, start, weights
from tests.helpers.workers import run_workers

UNITS = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["a", "b", "body"]}
STEPS = 6
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5),
}


class Branches(nn.Module):
    """A body, and two branches of unequal size of which a batch takes one, both or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.body = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), nn.Linear(4, 4)

    def forward(self, x: Tensor, which: str) -> Tensor:
        x = torch.tanh(self.body(x))
        return sum((getattr(self, name)(x) for name in which), x[:, :3] * 2.0)


def alike(step: int, rank: int) -> str:
    return ("a", "b", "", "ab", "b", "a")[step]


def apart(step: int, rank: int) -> str:
    return ("ab", "ba", "", "a", "b", "aab")[(step + rank) % 6]


def loss(model: nn.Module, step: int, rank: int, branch: Callable[[int, int], str]) -> Tensor:
    found: Tensor = model(batch(step, rank), branch(step, rank)).square().mean()
    return found


def in_one_process(rule: str, branch: Callable[[int, int], str], per_step: int = 1) -> Tensor:
    net = Branches()
    optimizer = RULES[rule](net.parameters())
    for step in range(0, STEPS, per_step):
        for part in range(step, step + per_step):
            sum(loss(net, part, rank, branch) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return flat(net.state_dict())


def train(
    stage: int, units: dict[str, Any], rule: str, branch: Callable[[int, int], str], loop: str = "", find: bool = True
) -> Tensor:
    start({"sharding": True, "sharding_configs": {"stage": stage, **units}, "find_unused_parameters": find})
    net, rank = Branches(), fleet.worker_index()
    optimizer = fleet.distributed_optimizer(RULES[rule](net.parameters()))
    model = fleet.distributed_model(net)
    for step in range(0, STEPS, 2 if loop else 1):
        if loop == "no_sync":
            with model.no_sync():
                loss(model, step, rank, branch).backward()
            loss(model, step + 1, rank, branch).backward()
        elif loop == "two passes":
            losses = [loss(model, step + part, rank, branch) for part in range(2)]
            with torch.no_grad():
                model(batch(step, rank), "ab"[rank])  # gives up what was gathered
            for one in losses:
                one.backward()
        else:
            loss(model, step, rank, branch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def find_unused(rank: int, world_size: int) -> dict[str, Tensor]:
    warnings.simplefilter("error")
    found = {}
    for stage in (2, 3):
        for name, units in (("whole", {}), ("units", UNITS)):
            for rule in RULES:
                found[f"alike {rule} {stage} {name}"] = train(stage, units, rule, alike)
                found[f"apart {rule} {stage} {name}"] = train(stage, units, rule, apart)
        for loop in ("no_sync", "two passes"):
            found[f"{loop} {stage}"] = train(stage, UNITS, "adamw", apart, loop)
        found[f"alone {stage}"] = train(stage, UNITS, "adamw", alike, find=False)
    return found


def test_workers_that_use_other_parameters_equal_one_process() -> None:
    """Issue 36: gradients of two branches were added up, and an unused one got zeros, which decay and momentum move."""
    branches = {"alike": alike, "apart": apart}
    plain = {f"{name} {rule}": in_one_process(rule, branch) for name, branch in branches.items() for rule in RULES}
    merged = in_one_process("adamw", apart, per_step=2)
    first, second = run_workers(find_unused, 2, backend=None)
    for name, found in first.items():
        expected = plain["alike adamw"] if "alone" in name else plain.get(" ".join(name.split()[:2]), merged)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}\n{text}")
        torch.testing.assert_close(found, second[name], rtol=0, atol=0)


def refused(rank: int, world_size: int) -> dict[str, str]:
    return {
        f"{stage} {name}": message(lambda s=stage, u=units: train(s, u, "momentum", lambda _, r: "ab"[r], find=False))
        for stage in (2, 3)
        for name, units in (("whole", {}), ("units", UNITS))
    }


def test_branches_by_worker_are_refused_before_they_are_mixed_up() -> None:
    for found in run_workers(refused, 2, backend=None):
        for name, text in found.items():
            in_units = "units" in name and name[0] == "3"
            what = "gathering the parameters of the unit 'a'" if in_units else "gradients of a.weight, a.bias"
            assert what in text, name
            assert "set strategy.find_unused_parameters = True" in text


def deviate(rank: int, world_size: int, units: dict[str, Any]) -> str:
    def late(step: int, worker: int) -> str:
        return "a" if step < 3 or worker else "b"

    try:
        train(3, units, "momentum", late, find=False)
    except (FleetError, RuntimeError) as error:  # the other one's exchange breaks off
        return str(error)
    return ""


@pytest.mark.parametrize("units", [{}, UNITS], ids=["whole", "units"])
def test_one_worker_that_leaves_the_others_is_refused(units: dict[str, Any]) -> None:
    """After steps in which all did the same, one alone takes another branch while the others go on as before."""
    found = run_workers(deviate, 2, units, backend=None, environment={"FLEET_WAIT_LIMIT": "1"})
    assert ("'b'" if units else "b.0.weight") in found[0]
    assert "strategy.find_unused_parameters = True" in found[0]
    assert "waits in an exchange" in found[0]
