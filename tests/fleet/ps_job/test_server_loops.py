"""The loops that people write over parameter servers, with and without clearing, against plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.facade import Fleet
from tests.helpers.served import ServedJob, run_job

_SEEDING = threading.Lock()
Loop = Callable[[Any, torch.Tensor], None]


class Net(nn.Module):
    """A served table, and dense parameters of which one is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out, self.extra = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        rows = self.emb(ids)
        return self.out(rows) if step % 2 else self.out(rows) + self.extra(rows)


def minimize_alone(optimizer: Any, loss: torch.Tensor) -> None:
    """The static and server loops: nothing is cleared."""
    optimizer.minimize(loss)


def minimize_after_backward(optimizer: Any, loss: torch.Tensor) -> None:
    """The eager loop."""
    loss.backward()
    optimizer.minimize(loss)
    optimizer.clear_grad()


def step_alone(optimizer: Any, loss: torch.Tensor) -> None:
    """The loop of the PyTorch tutorials."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def minimize_then_clear(optimizer: Any, loss: torch.Tensor) -> None:
    """The loop of the migration guide."""
    optimizer.minimize(loss)
    optimizer.clear_grad()


LOOPS = [minimize_alone, minimize_after_backward, step_alone, minimize_then_clear]


def data(rank: int = 0, num_workers: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    found = [(torch.randint(0, 10, (4,), generator=made), torch.randn(4, 1, generator=made)) for _ in range(4)]
    return [(ids[rank::num_workers], target[rank::num_workers]) for ids, target in found]


def plainly() -> dict[str, torch.Tensor]:
    """Returns what one process makes of all the data; a parameter without gradient counts as one with zeros."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step, (ids, target) in enumerate(data()):
        optimizer.zero_grad()
        (net(ids, step) - target).square().mean().backward()
        optimizer.step()
    return net.state_dict()


def strategy(mode: str) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = mode in ("async", "geo")
    if mode == "geo":
        made.a_sync_configs = {"k_steps": 2}
    if mode == "hybrid":
        made.hybrid_configs = {"dp_degree": 1}
    return made


def train(own: Fleet, mode: str, loop: Loop, share: Any) -> dict[str, torch.Tensor]:
    with _SEEDING:  # the generator belongs to the whole process
        net = Net()
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), strategy(mode))
    model = own.distributed_model(net)
    own.init_worker()
    for step, (ids, target) in enumerate(share):
        loop(optimizer, (model(ids, step) - target).square().mean())
        if mode == "async":
            own.session.server_job.trainer.connection.flush()
    found = model.state_dict()
    own.stop_worker()
    return found


@pytest.mark.parametrize("mode", ["sync", "async", "geo", "hybrid"])
@pytest.mark.parametrize("loop", LOOPS)
def test_one_worker(mode: str, loop: Loop) -> None:
    """Issue 9, 1.13, D.7: rows and dense parameters are those of plain torch, whatever the loop clears."""
    own = Fleet()
    own.init(log_level="WARNING")
    found = train(own, mode, loop, data())
    own.session.close()
    for name, value in plainly().items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=0)


@pytest.mark.parametrize("loop", LOOPS)
def test_two_workers(loop: Loop) -> None:
    """Issue 9, 1.13, 002-18: synchronous workers are one process on all the data."""

    def work(own: Fleet, rank: int) -> Any:
        return train(own, "sync", loop, data(rank, 2))

    for found in run_job(work, num_workers=2, num_servers=2, strategy=strategy("sync")):
        for name, value in plainly().items():
            torch.testing.assert_close(found[name], value, atol=2e-6, rtol=0)


def test_losses_of_two_workers_in_other_modes() -> None:
    """Issue 9, 1.13, D.7: asynchronous updates add up, once each: with the same data two workers move twice as far."""

    def work(own: Fleet, rank: int) -> Any:
        with _SEEDING:
            net = Net()
        optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), strategy("async"))
        model = own.distributed_model(net)
        own.init_worker()
        for _ in range(3):
            optimizer.minimize(model.out.bias.sum())  # a gradient of 1 in each step, whatever is stale
        own.session.server_job.trainer.connection.flush()
        own.barrier_worker()
        own.session.server_job.trainer.connection.flush()
        moved = model.state_dict()["out.bias"]
        own.stop_worker()
        return moved

    with _SEEDING:
        start = Net().out.bias.item()
    for bias in run_job(work, num_workers=2, strategy=strategy("async")):
        assert bias.item() == pytest.approx(start - 2 * 3 * 0.1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of the compiler
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
@pytest.mark.parametrize("make", [lambda: nn.Embedding(9, 4, sparse=True), lambda: fleet.SparseEmbedding(4)])
def test_a_compiled_model_is_evaluated_between_steps(mode: str, make: Callable[[], nn.Module]) -> None:
    """Issue 37, 5: the compiler leaves lookups out; it failed on the arrays of those that record no gradient."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        job = ServedJob(mode, lambda: nn.Sequential(make(), nn.Linear(4, 1)), 0.1)
        run: Any = torch.compile(job.model, backend="eager") if compiled else job.model
        for _ in range(2):
            run(torch.arange(4)).square().sum().backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.trainer.connection.flush()
            with torch.no_grad():
                scores = run(torch.arange(4))
        found.append(scores)
        job.end()
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
