"""The alarm ends workers that another one leaves behind (003-35)."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fleet.env import Environment
from fleet.errors import NanInfError
from tests.helpers.sources import ROOT
from tests.helpers.workers import free_ports, run_workers, worker_environment
from tests.strategies.test_check_nan_inf import NAN, batch, start

ALONE = """
import time, torch, torch.distributed as dist
from tests.strategies.test_check_nan_inf import *
model, optimizer = start()
rank = dist.get_rank()
train(model, optimizer, batch(0, rank))
model.eval()
if rank == 0:
    dist.barrier()  # rank 1 never comes
with torch.no_grad():
    try:
        model(batch(1) * NAN)
    except NanInfError as error:
        print("raised:", error, flush=True)
        time.sleep(30)  # its connections stay open: only the alarm can end rank 0
"""


def started(code: str, rank: int, world_size: int, ports: list[int]) -> subprocess.Popen[str]:
    variables = {**Environment().inherited(), **worker_environment(rank, world_size, ports), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=variables, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow  # two new interpreters
def test_a_worker_in_a_collective_is_ended() -> None:
    """003-35: without the launcher; rank 1 fails alone, stays alive, and rank 0 is in a barrier it never joins."""
    ports = free_ports(3)
    workers = [started(ALONE, rank, 2, ports) for rank in range(2)]
    try:
        assert workers[1].stdout is not None
        line = workers[1].stdout.readline()
        raised_at = time.monotonic()
        assert line.startswith("raised: step 1, rank 1: NaN first appears in input 0 of the model"), line
        _, errors = workers[0].communicate(timeout=40)
        assert time.monotonic() - raised_at < 15
        assert workers[0].returncode == 1
        assert "[rank 0] stops: step 1, rank 1: NaN first appears in input 0 of the model" in errors
        assert workers[1].poll() is None
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def heed_the_alarm(rank: int, world_size: int) -> tuple[str, int]:
    """Rank 1 fails in evaluation; rank 0 is busy with its own evaluation and hears of it there."""
    model, _ = start()
    dist.barrier()
    with torch.no_grad():
        for _ in range(400):
            try:
                model(batch(0) * (NAN if rank == 1 else 1.0))
            except NanInfError as error:
                return str(error), error.rank
            time.sleep(0.02)
    return "", -1


def test_the_alarm_reaches_a_busy_worker() -> None:
    """003-35: evaluation of different lengths; the other worker raises at its next forward."""
    first, second = run_workers(heed_the_alarm, 2, backend=None)
    assert first == second
    assert first[1] == 1
    assert first[0].startswith("step 0, rank 1: NaN first appears in input 0 of the model")
