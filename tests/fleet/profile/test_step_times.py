"""StepTimes: what each stretch of a step is counted as, in every form of the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.job.listener import Listener
from fleet.job.running import running_session
from fleet.profile.step_times import PARTS, StepTimes
from fleet.profile.step_watch import StepWatch
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer
from tests.helpers.workers import run_workers


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Model(nn.Module):
    """Takes 10 units for a forward and 100 for a backward pass."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer, self.clock = nn.Linear(2, 1), clock
        self.layer.weight.register_hook(lambda _: self._pass())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += 10
        y: torch.Tensor = self.layer(x)
        return y

    def _pass(self) -> None:
        self.clock.now += 100


class Sgd(torch.optim.SGD):
    """Takes 1000 units for an update."""

    clock: Clock

    def step(self, closure: Any = None) -> Any:
        """Steps."""
        self.clock.now += 1000
        return super().step(closure)


def start(
    strategy: fleet.DistributedStrategy | None = None,
) -> tuple[Clock, StepTimes, FleetModel, FleetOptimizer, list[dict[str, int]]]:
    """Returns a clock, the times that it feeds, a model and an optimizer, and the parts of each step so far."""
    clock = Clock()
    fleet.init(is_collective=True, strategy=strategy)
    session: Any = running_session()
    times = session.job.listeners.get(StepWatch).measure(StepTimes(clock))
    optimizer = Sgd((model := Model(clock)).parameters(), lr=0.1)
    optimizer.clock = clock
    steps: list[dict[str, int]] = []

    class Steps(Listener):
        def after_step(self, step: int) -> None:
            steps.append({k: v for k, v in times.take().items() if v})

    session.job.listeners.add(Steps())
    return clock, times, fleet.distributed_model(model), fleet.distributed_optimizer(optimizer), steps


def batch(clock: Clock) -> torch.Tensor:
    """Returns a batch that takes 1 unit."""
    clock.now += 1
    return torch.ones(4, 2)


def loss_of(clock: Clock, y: torch.Tensor) -> torch.Tensor:
    """Returns a loss that takes 5 units."""
    clock.now += 5
    return y.mean()


def plain(clock: Clock, model: Any, optimizer: Any) -> None:
    """The documented loop."""
    loss_of(clock, model(batch(clock))).backward()
    clock.now += 7  # clipping
    optimizer.step()
    optimizer.zero_grad()


def accumulating(clock: Clock, model: Any, optimizer: Any) -> None:
    """Two batches in one step."""
    for _ in range(2):
        loss_of(clock, model(batch(clock))).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluating(clock: Clock, model: Any, optimizer: Any) -> None:
    """A validation batch before each step."""
    with torch.no_grad():
        model(batch(clock))
    plain(clock, model, optimizer)


def with_closure(clock: Clock, model: Any, optimizer: Any) -> None:
    """The step calls the closure."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(clock, model(batch(clock)))
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def scaled(clock: Clock, model: Any, optimizer: Any) -> None:
    """With a GradScaler."""
    scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu"))
    scaler.scale(loss_of(clock, model(batch(clock)))).backward()
    clock.now += 7
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def failing(clock: Clock, model: Any, optimizer: Any) -> None:
    """A batch that the model refuses, and one that it takes."""
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(4, 3))
    plain(clock, model, optimizer)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (plain, {"data": 1, "forward": 15, "backward": 100, "update": 1000, "other": 7}),
        (accumulating, {"data": 2, "forward": 30, "backward": 200, "update": 1000}),
        (evaluating, {"data": 1, "forward": 15, "backward": 100, "update": 1000, "other": 18}),
        (with_closure, {"forward": 15, "backward": 100, "update": 1001}),
        (scaled, {"data": 1, "forward": 15, "backward": 100, "update": 1000, "other": 7}),
        (failing, {"data": 0, "forward": 26, "backward": 100, "update": 1000, "other": 7}),
    ],
)
def test_the_parts_of_a_step(loop: Callable[..., None], expected: dict[str, int]) -> None:
    clock, _, model, optimizer, steps = start()
    for _ in range(3):
        loop(clock, model, optimizer)
    assert steps == [{part: value for part, value in expected.items() if value}] * 3


def test_two_models_and_two_optimizers_have_steps_of_their_own() -> None:
    clock, _, model, optimizer, steps = start()
    second = Sgd((other := Model(clock)).parameters(), lr=0.1)
    second.clock = clock
    model_2, optimizer_2 = fleet.distributed_model(other), fleet.distributed_optimizer(second)
    for _ in range(2):
        plain(clock, model, optimizer)
        loss_of(clock, model(batch(clock)) + model_2(batch(clock))).backward()
        optimizer_2.step()
        optimizer.zero_grad()
        optimizer_2.zero_grad()
    one, both = steps[:2]
    assert one == {"data": 1, "forward": 15, "backward": 100, "update": 1000, "other": 7}
    assert both == {"data": 1, "forward": 26, "backward": 200, "update": 1000}
    assert steps[2:] == steps[:2]


def test_spans_are_kept_on_request() -> None:
    clock, times, model, optimizer, _ = start()
    times.spans = []
    plain(clock, model, optimizer)
    assert times.spans[0][0] == "data"
    assert all(before[2] == after[1] for before, after in zip(times.spans, times.spans[1:], strict=False))
    assert {name for name, _, _ in times.spans} <= set(PARTS)


def train_beside_a_late_worker(rank: int, world_size: int) -> dict[str, float]:
    """Returns the largest of each part of three steps, in seconds; the backward pass of worker 1 takes long."""
    fleet.init(is_collective=True)
    session: Any = running_session()
    times = session.job.listeners.get(StepWatch).measure(StepTimes())
    model = nn.Linear(4, 4)
    if rank == 1:
        model.weight.register_hook(lambda _: time.sleep(0.3))
    wrapped = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    steps = []
    for _ in range(3):
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(times.take())
    return {part: max(step[part] for step in steps) / 1e9 for part in PARTS}


def test_a_worker_that_waits_for_a_late_one_is_in_the_exchange() -> None:
    early, late = run_workers(train_beside_a_late_worker, 2)
    assert early["exchange"] > 0.1
    assert late["backward"] >= 0.3


def test_the_batches_of_an_update_are_steps_of_its_optimizer_and_no_data() -> None:
    """Two logical workers in one process; what follows backward in the turn of the first is part of the update."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 2}
    clock, _, model, optimizer, steps = start(strategy)
    for _ in range(2):
        for _ in fleet.elastic.logical_ranks():
            plain(clock, model, optimizer)
            clock.now += 50
    # Of two turns: 2 batches, 2 forwards with losses, 2 backwards; 7 + 50 in the first one, the update in the second.
    assert steps[1] == {"data": 2 + 50, "forward": 30, "backward": 200, "update": 57 + 1000, "other": 7}
