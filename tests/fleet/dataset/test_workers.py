"""Where a dataset finds the other workers, and the bytes between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import fleet
from fleet.dataset._workers import GlooWorkers, OneWorker, WorkerGroup, sum_over, worker_group_of
from fleet.errors import ConfigError, NotInitializedError, UnsupportedOptionError
from fleet.facade import Fleet
from tests.helpers.workers import run_workers


def _exchange(rank: int, world_size: int) -> list[Any]:
    assert dist.group.WORLD is not None
    group = GlooWorkers(dist.group.WORLD)
    assert isinstance(group, WorkerGroup)
    found = group.all_to_all_bytes([bytes([rank, to]) * (rank + 3 * to) for to in range(world_size)])
    nothing = group.all_to_all_bytes([b""] * world_size)
    group.barrier()
    total = sum_over(group, -(2**40) + rank)
    return [[part.hex() for part in found], [part.hex() for part in nothing], total, (group.rank, group.size)]


def test_bytes_reach_the_worker_they_are_for() -> None:
    for rank, (found, nothing, total, place) in enumerate(run_workers(_exchange, 3)):
        assert found == [bytes([sender, rank]).hex() * (sender + 3 * rank) for sender in range(3)]
        assert nothing == [""] * 3
        assert total == -3 * 2**40 + 3
        assert place == (rank, 3)


def test_one_worker_is_alone() -> None:
    group = OneWorker()
    assert isinstance(group, WorkerGroup)
    assert group.all_to_all_bytes([b"x"]) == [b"x"]
    assert sum_over(group, 5) == 5


def facade(**session: Any) -> Fleet:
    """Returns a Fleet with a session that answers these questions."""
    found = Fleet()
    role = SimpleNamespace(is_worker=lambda: session.get("worker", True))
    found._session = SimpleNamespace(**{"role_maker": role, "world_size": 2, "host_group": None, **session})  # type: ignore[assignment]
    return found


def test_workers_without_a_group_are_told_what_to_set() -> None:
    """A parameter-server job without PADDLE_WITH_GLOO."""
    with pytest.raises(UnsupportedOptionError, match="the 2 workers .* PADDLE_WITH_GLOO=1"):
        worker_group_of(facade(), "global_shuffle")


def test_who_cannot_exchange() -> None:
    with pytest.raises(ConfigError, match="this process is a parameter server"):
        worker_group_of(facade(worker=False), "global_shuffle")
    with pytest.raises(NotInitializedError, match=r"fleet.init\(\)"):
        worker_group_of(Fleet(), "global_shuffle")
    with pytest.raises(ConfigError, match="takes fleet after"):
        worker_group_of(3, "global_shuffle")
    assert isinstance(worker_group_of(facade(world_size=1), "global_shuffle"), OneWorker)


def test_a_group_of_the_users_own_is_used() -> None:
    group = OneWorker()
    assert worker_group_of(group, "global_shuffle") is group


def test_the_package_itself_stands_for_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(fleet), "_fleet", facade(world_size=1))
    assert isinstance(worker_group_of(fleet, "global_shuffle"), OneWorker)
