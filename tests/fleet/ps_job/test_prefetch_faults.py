"""Jobs with 26 tables and loops over fleet.prefetch, in which servers and workers are killed at random times."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fleet.ps_job.test_standby_faults import TURN, TakingTurns, turns_of
from tests.helpers.ps_fault_job import FaultJob, Kill, Task, Training
from tests.helpers.ps_many_tables import COUNTS, VALUES, expected_of

WORKERS, KILLS, LIMIT_S = 2, 20, 280
STEPS = TURN * (KILLS + 1)

Tables = dict[str, Tensor]


def training_of(task: Task) -> Training:
    return Training(task=task, prefetches=True, limit_s=LIMIT_S)


class KilledAtRandom(FaultJob):
    """Kills a moment after the step at which a kill is due."""

    rng = random.Random(0)

    def kill(self, name: str) -> None:
        time.sleep(self.rng.uniform(0, 0.05))
        super().kill(name)


def job_of(folder: Path, mode: str, servers: int, task: Task, *, steps: int = STEPS) -> FaultJob:
    training = training_of(task)
    return KilledAtRandom(folder, mode, num_servers=servers, num_workers=WORKERS, steps=steps, training=training)


def kills_of(seed: int, names: list[str], kinds: tuple[str, ...], each: int, total_steps: int) -> list[Kill]:
    """Returns ``each`` kills of every kind of process, at random points."""
    rng = random.Random(seed)
    killed = [rng.choice([name for name in names if name.startswith(kind)]) for kind in kinds for _ in range(each)]
    rng.shuffle(killed)
    points = sorted(rng.randrange(8, total_steps * 9 // 10) for _ in killed)
    return [Kill(steps, name) for steps, name in zip(points, killed, strict=True)]


def check(found: Tables, expected: Tables) -> None:
    assert found.keys() == expected.keys()
    wrong = {name: (found[name] - values).abs().sum().item() for name, values in expected.items()}
    assert not any(wrong.values()), {name: difference for name, difference in wrong.items() if difference}
    assert all(torch.equal(found[name], values) for name, values in expected.items())


BOTH = ("server", "worker")


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "kinds"), [(1, BOTH), (2, ("server",))])
def test_sync_training_has_the_same_bits(tmp_path: Path, servers: int, kinds: tuple[str, ...]) -> None:
    """20 kills of a server, and 20 of a worker beside them where there is one server.

    A worker that is killed in the middle of a push to two servers repeats the step with the rows of the one that has
    applied it: the gradient that the other one gets is computed from newer rows.
    """
    job = job_of(tmp_path / "job", "sync", servers, VALUES)
    kills = kills_of(servers, job.names, kinds, KILLS, WORKERS * STEPS)
    check(job.run(kills, limit_s=LIMIT_S), expected_of(VALUES, WORKERS, STEPS, mean=True))
    assert len(job.pids) == len(job.names) + len(kills)
    assert "replayed" in job.logs(10**6)
    assert not job.orphans()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "servers"), [("sync", 2), ("async", 1), ("async", 2)])
def test_every_gradient_counts_once(tmp_path: Path, mode: str, servers: int) -> None:
    """20 kills of a server and 20 of a worker; gradients do not depend on rows, so repeated ones are the lost ones."""
    job = job_of(tmp_path / "job", mode, servers, COUNTS)
    kills = kills_of(servers, job.names, BOTH, KILLS, WORKERS * STEPS)
    check(job.run(kills, limit_s=LIMIT_S), expected_of(COUNTS, WORKERS, STEPS, mean=mode == "sync"))
    assert len(job.pids) == len(job.names) + len(kills)
    assert job.repeated() > 0
    assert not job.orphans()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_standbys_that_take_over(tmp_path: Path, mode: str, servers: int) -> None:
    """20 kills of the server that leads, which loses its folder; its standby takes over."""
    task = VALUES if mode == "sync" else COUNTS
    job = TakingTurns(tmp_path / "job", mode, turns=KILLS, num_servers=servers, training=training_of(task))
    rng = random.Random(servers)
    names = [f"leader-{rng.randrange(servers)}" for _ in range(KILLS)]
    found = job.run(turns_of(names), limit_s=LIMIT_S)
    check(found, expected_of(task, WORKERS, STEPS, mean=mode == "sync"))
    assert len(job.led) == KILLS
    assert not job.orphans()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_and_a_worker_that_are_killed_once(tmp_path: Path, mode: str) -> None:
    task, steps = (VALUES if mode == "sync" else COUNTS), 12
    job = job_of(tmp_path / "job", mode, 1, task, steps=steps)
    found = job.run([Kill(7, "server-0"), Kill(14, "worker-1")], limit_s=LIMIT_S)
    check(found, expected_of(task, WORKERS, steps, mean=mode == "sync"))
