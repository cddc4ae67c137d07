"""Jobs in sync mode, and the same training in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fleet.facade import Fleet
from tests.helpers.served import ServedJob, run_job, strategy_of

__all__ = ["RATE", "Job", "Net", "differs", "ids_of", "loss_of", "plain", "run_workers", "train"]

RATE = 0.05
_SEEDING = threading.Lock()


class Net(nn.Module):
    """A table and dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        with _SEEDING:
            torch.manual_seed(0)
            self.emb = nn.Embedding(50, 8, sparse=True)
            self.hidden = nn.Linear(8, 200)
            self.middle = nn.Linear(200, 100)
            self.out = nn.Linear(100, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(ids).relu() if ids.ndim == 1 else self.emb(ids).sum(1)
        return self.out(self.middle(self.hidden(hidden).relu()).relu())

    def dense(self) -> list[nn.Parameter]:
        return [*self.hidden.parameters(), *self.middle.parameters(), *self.out.parameters()]


def ids_of(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - ids[:, None].float() / 50).square().mean()


def plain(steps: int, *ranks: int, then: Sequence[tuple[int, Sequence[int]]] = ()) -> Net:
    """Trains in one process on all the data: ``steps`` steps of ``ranks``, then numbers of steps of others."""
    net = Net()
    made = torch.optim.SGD(net.parameters(), RATE)
    step = 0
    for count, those in [(steps, ranks or (0,)), *then]:
        for _ in range(count):
            made.zero_grad()
            (sum(loss_of(net, ids_of(step, rank)) for rank in those) / len(those)).backward()
            made.step()
            step += 1
    return net


def differs(net: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(net.dense(), other.dense(), strict=True))  # type: ignore[operator]


class Job(ServedJob):
    """One worker, with its server inside."""

    def __init__(self) -> None:
        super().__init__("sync", Net, RATE)
        self.count = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, ids_of(self.count)).backward()
        self.optimizer.step()
        self.count += 1

    def is_right(self) -> bool:
        return differs(self.net, plain(self.count)) < 1e-6


def run_workers(work: Callable[[Fleet, int, Net, Any, Any], Any], num_workers: int = 2, **job: Any) -> list[Any]:
    """Runs ``work(fleet, rank, net, model, optimizer)`` on each worker, after ``init_worker``."""

    def run(own: Fleet, rank: int) -> Any:
        strategy = strategy_of("sync")
        net = Net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), RATE), strategy)
        model = own.distributed_model(net)
        own.init_worker()
        found = work(own, rank, net, model, optimizer)
        own.stop_worker()
        return found

    return run_job(run, num_workers=num_workers, strategy=strategy_of("sync"), **job)


def train(model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, ids_of(step, rank)).backward()
        optimizer.step()
