"""A parameter-server job in one process: every server and worker is a thread with a Fleet of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fleet
from fleet.facade import Fleet
from fleet.role_maker import Role, UserDefinedRoleMaker
from tests.helpers.workers import free_ports

__all__ = ["RowSum", "ServedJob", "WideAndDeep", "batches", "run_job", "strategy_of", "train"]

WIDE = ("uniform", -0.5, 0.5)


class WideAndDeep(nn.Module):
    """One table of unbounded ids, one ``nn.Embedding``, and a linear layer."""

    def __init__(self, combiner: str = "sum", **settings: Any) -> None:
        super().__init__()
        start = fleet.ps.Initializer(*WIDE)
        self.ads = fleet.SparseEmbedding(4, combiner=combiner, initializer=start, **settings)
        self.words = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(8, 1)

    def forward(self, ads: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Returns one number per sample."""
        return self.out(torch.cat([self.ads(ads), self.words(words)], 1))


class RowSum(nn.Module):
    """An ``nn.Embedding`` whose row 3 is padding, and a linear layer."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(num_rows, 3, padding_idx=3, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns one number per sample."""
        return self.out(self.emb(ids).sum(1))


def strategy_of(mode: str, num_workers: int = 1, k_steps: int = 2, **options: Any) -> fleet.DistributedStrategy:
    """Returns the strategy of a mode: sync, half_async, async, geo, or hybrid (with rows as in sync)."""
    if mode == "half_async":
        return fleet.StrategyFactory.create_half_async_strategy()
    made = fleet.DistributedStrategy()
    made.a_sync = mode not in ("sync", "hybrid")
    if mode == "geo":
        made.a_sync_configs = {"k_steps": k_steps}
    if mode == "hybrid":
        made.hybrid_configs = {"dp_degree": num_workers}
    for name, value in options.items():
        setattr(made, name, value)
    return made


class ServedJob:
    """A worker with its server inside; ``net`` is the script's module, ``model`` the wrapped one.

    Args:
        mode: as in :func:`strategy_of`, which takes ``options``.
        make_net: called with a seeded generator.
        rate: of SGD.
        own: the Fleet, by default one of its own.
    """

    def __init__(
        self, mode: str, make_net: Callable[[], Any], rate: float, own: Fleet | None = None, **options: Any
    ) -> None:
        self.mode, self.own = mode, own or Fleet()
        self.strategy = strategy_of(mode, **options)
        self.own.init(strategy=self.strategy, log_level="ERROR")
        torch.manual_seed(0)
        self.net = make_net()
        self.plain = torch.optim.SGD(self.net.parameters(), rate)
        self.optimizer = self.own.distributed_optimizer(self.plain, self.strategy)
        self.model = self.own.distributed_model(self.net)
        self.own.init_worker()
        self.trainer = self.own.session.server_job.trainer

    def step(self) -> None:
        """Trains one step."""
        self.optimizer.zero_grad()
        self.model(torch.arange(3)).square().sum().backward()
        self.optimizer.step()

    def end(self) -> None:
        """Leaves the job."""
        self.own.stop_worker()
        self.own.session.close()


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batches(count: int, rank: int = 0, num_workers: int = 1, size: int = 8) -> list[Batch]:
    """Returns this worker's share of batches that are the same in every test."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        ads = torch.randint(0, 40, (size, 3), generator=generator) * 10**12
        words = torch.randint(0, 20, (size,), generator=generator)
        target = ((ads // 10**12 % 7).sum(1) + words % 3).float()[:, None] / 10
        found.append(tuple(part[rank::num_workers] for part in (ads, words, target)))
    return found


def train(model: Any, optimizer: Any, data: Sequence[Batch], scheduler: Any = None) -> list[float]:
    """Trains and returns the losses."""
    losses = []
    for ads, words, target in data:
        loss = ((model(ads, words) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def _free_endpoints(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def _serve_plainly(own: Fleet, index: int) -> None:
    own.init_server()
    own.run_server()


def run_job(
    work: Callable[[Fleet, int], Any],
    *,
    num_servers: int = 1,
    num_workers: int = 1,
    serve: Callable[[Fleet, int], Any] = _serve_plainly,
    strategy: Any = None,
    limit_s: float = 40.0,
) -> list[Any]:
    """Runs ``work(fleet, rank)`` on every worker and returns what they returned.

    Servers call ``serve(fleet, index)``, by default ``init_server`` and ``run_server``. A failure of any of them is
    raised here.
    """
    endpoints = _free_endpoints(num_servers)
    results: list[Any] = [None] * num_workers
    failures: list[BaseException] = []

    def run(role: Role, number: int) -> None:
        own = Fleet()
        maker = UserDefinedRoleMaker(current_id=number, role=role, worker_num=num_workers, server_endpoints=endpoints)
        try:
            own.init(maker, strategy=strategy, log_level="WARNING")
            if role is Role.SERVER:
                serve(own, number)
            else:
                results[number] = work(own, number)
        except BaseException as error:
            failures.append(error)
        finally:
            own.session.close()

    threads = [threading.Thread(target=run, args=(Role.SERVER, i), daemon=True) for i in range(num_servers)]
    workers = [threading.Thread(target=run, args=(Role.WORKER, i), daemon=True) for i in range(num_workers)]
    for thread in (*threads, *workers):
        thread.start()
    for thread in workers:
        thread.join(limit_s)
    for thread in threads if not failures else ():
        thread.join(limit_s)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in (*threads, *workers)), "the job did not end"
    return results
