"""What a checkpoint takes and when a job may stop, as a strategy of another package declares it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.checkpoint.commit import read_index
from fleet.checkpoint.storage import LocalFolder
from fleet.elastic.health import Health
from fleet.job.running import running_session
from fleet.strategies import REGISTRY, Stage, Strategy
from fleet.strategies._declare.strategy import Values
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from tests.fleet.elastic.training import Training
from tests.helpers.workers import run_workers


class DriftingOptimizer(OptimizerWrapper):
    """Adds up what each worker has moved by, and pulls the worker back by a part of it at every third step."""

    trains_locally = True
    has_own_state = True

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.moved = [torch.zeros_like(p) for p in self.parameters()]
        self.steps = 0

    @property
    def is_out_of_step(self) -> bool:
        return self.steps % 3 != 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        before = [p.clone() for p in self.parameters()]
        result = super().step(closure)
        self.steps += 1
        for moved, parameter, was in zip(self.moved, self.parameters(), before, strict=True):
            moved.add_(parameter - was)
            if not self.is_out_of_step:
                parameter.sub_(moved, alpha=0.1)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "drifting": {"moved": [t.clone() for t in self.moved], "steps": self.steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "drifting"})
        self.steps = state_dict["drifting"]["steps"]
        for moved, saved in zip(self.moved, state_dict["drifting"]["moved"], strict=True):
            moved.copy_(saved)


@contextmanager
def drifting() -> Iterator[dict[str, Any]]:
    """Registers the strategy, as the entry point of another package would; yields the options that turn it on."""

    class Drifting(Strategy):
        name = "drifting"
        meaning = "Train each worker by itself."
        stage = Stage.STEP
        optimizer_effect = "pulls each worker back by a part of what it has moved"

        @classmethod
        def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
            return {"data_parallel": ()}

        def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
            return DriftingOptimizer(optimizer)

    try:
        yield {"drifting": True}
    finally:
        del REGISTRY["drifting"]


class Recording(Training):
    """Notes after each step whether the health of the job says that all workers may stop there."""

    stops: list[bool]

    def step(self, batch: Tensor) -> None:
        super().step(batch)
        session = running_session()
        assert session is not None
        health = session.job.listeners.get(Health)
        self.stops = [*getattr(self, "stops", []), health._is_synchronised()]


def cut_and_go_on(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Trains two epochs, then the same cut after step 4; returns what both came to and where the job could stop."""
    with drifting() as options:
        whole = Recording(f"{folder}/whole", options)
        whole.run(2)
        wanted, moved = whole.numbers(), moved_by(whole)
        Training(f"{folder}/cut", options).run(2, stop_at=4)
        again = Training(f"{folder}/cut", options)
        resumed = again.checkpoint.resume()
        again.run(2)
        same = [torch.equal(a, b) for a, b in zip(again.numbers(), wanted, strict=True)]
        return {"resumed": resumed, "same": same, "moved": moved, "again": moved_by(again), "stops": whole.stops}


def moved_by(training: Training) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in training.optimizer.moved])


def test_a_plug_in_says_that_its_workers_differ(tmp_path: Path) -> None:
    """Its state is saved and restored for each worker, and no job stops between its exchanges."""
    one, two = run_workers(cut_and_go_on, 2, str(tmp_path), backend=None, environment={"FLEET_PREEMPT_GRACE": "30"})
    for worker in (one, two):
        assert worker["resumed"]
        assert all(worker["same"])
        assert torch.equal(worker["again"], worker["moved"])
        assert worker["stops"] == [step % 3 == 0 for step in range(1, 13)]
    assert not torch.equal(one["moved"], two["moved"])
    names = read_index(LocalFolder(tmp_path / "cut" / "step-0000000004")).tensors
    assert {"@0/model/0.weight", "@1/model/0.weight"} <= set(names)
