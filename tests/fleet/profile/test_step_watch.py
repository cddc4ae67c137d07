"""StepWatch: nothing is measured, and no exchange changed, unless somebody wants to know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.job.running import running_session
from fleet.profile.step_watch import StepWatch
from fleet.strategies._gradients.gradient_exchange import exchange_in
from tests.helpers.workers import run_workers


def wrap(rank: int, world_size: int) -> tuple[bool, bool, list[float]]:
    """Returns whether steps are measured, whether the exchange has a hook, and the gradients of two steps."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    model: Any = fleet.distributed_model(nn.Linear(3, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    session: Any = running_session()
    found: list[float] = []
    for _ in range(2):
        model(torch.full((1, 3), rank + 0.3)).square().sum().backward()
        found += model.weight.grad.flatten().tolist()
        optimizer.step()
        optimizer.zero_grad()
    return session.job.listeners.get(StepWatch).times is not None, exchange_in(model._chain).registered, found


def test_a_profile_measures_and_gives_the_same_gradients() -> None:
    plain = run_workers(wrap, 2)
    profiled = run_workers(wrap, 2, environment={"FLEET_PROFILE": "100:101"})
    assert [row[:2] for row in plain] == [(False, False)] * 2
    assert [row[:2] for row in profiled] == [(True, True)] * 2
    assert [row[2] for row in plain] == [row[2] for row in profiled]


def test_after_the_end_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PROFILE", "1:2")
    fleet.init(is_collective=True)
    session: Any = running_session()
    session.close()
    session.close()
    fleet.init(is_collective=True)
