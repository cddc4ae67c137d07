"""Parameter-server jobs in which anything may be killed at any time (D.7, D.10, decision 10, G11)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ps_fault_job import FaultJob, expected_tables, plan_kills

pytestmark = pytest.mark.slow
SERVERS, WORKERS, STEPS, KILLS = 3, 4, 36, 20


def start(folder: Path, mode: str) -> FaultJob:
    return FaultJob(folder, mode, num_servers=SERVERS, num_workers=WORKERS, steps=STEPS)


@pytest.mark.parametrize("mode", ["sync", "async", "bounded"])
def test_every_gradient_is_applied_once_whatever_is_killed(mode: str, tmp_path: Path) -> None:
    """D.7, D.10, 001-12: 20 kills of servers and workers; "exactly once", no hang, nothing left behind."""
    expected = expected_tables(WORKERS, STEPS, mean=mode == "sync")
    calm = start(tmp_path / "calm", mode)
    without = calm.run([])
    job = start(tmp_path / "faults", mode)
    kills = plan_kills(2026, KILLS, job.names, WORKERS * STEPS)
    assert {kill.name.split("-")[0] for kill in kills} == {"server", "worker"}
    found = job.run(kills)
    for name, values in expected.items():
        assert torch.equal(without[name], values), name
        assert torch.equal(found[name], values), name
    assert len(job.pids) == len(job.names) + KILLS
    assert job.repeated() > 0  # workers did go back to their files
    assert "replayed" in job.logs(10**6)  # and servers to their journals
    assert not calm.orphans() + job.orphans()
    assert not list(job.folder.glob("state/*/journal"))  # the job is over
