"""Servers that are killed and lose their folders while their standbys follow: the tables come out bit-equal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from tests.helpers.ps_fault_job import FaultJob, Training, expected_tables, plan_kills

SERVERS, WORKERS, STEPS = 2, 2, 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_lost_servers(tmp_path: Path, mode: str, seed: int) -> None:
    """Each of ten jobs loses both servers, disk and all, at random points."""
    job = FaultJob(
        tmp_path / "job",
        mode,
        num_servers=SERVERS,
        num_workers=WORKERS,
        steps=STEPS,
        standby=True,
        training=Training(after_step=_say_when),
    )
    points = plan_kills(seed, 2, ["server-0"], STEPS * WORKERS)
    kills = [type(kill)(kill.steps, f"server-{index}") for index, kill in enumerate(points)]
    found = job.run(kills)
    expected = expected_tables(WORKERS, STEPS, mean=mode == "sync")
    for name, table in expected.items():
        assert torch.equal(found[name], table), name


def _say_when(rank: int, step: int) -> None:
    print(f"step {step} at {time.monotonic()}", flush=True)
