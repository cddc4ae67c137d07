"""Two launchers: a request to one stops the whole job, and the node of the rank that hangs speaks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fleet.elastic import PREEMPTED
from tests.fleet.elastic.test_health import TRAIN
from tests.helpers.workers import free_ports
from tests.launch.launcher import Launcher

SECRET = {"FLEET_JOB_SECRET": "ab" * 32}


@pytest.mark.slow
def test_sigterm_to_one_launcher_saves_the_whole_job(tmp_path: Path) -> None:
    flags = ("--nnodes=2", f"--master=127.0.0.1:{free_ports(1)[0]}", "--preempt_grace=40")
    arguments = ("400", "none", "1", "0")
    with (
        Launcher(tmp_path / "a", TRAIN, *flags, "--rank=0", env=SECRET, args=arguments) as first,
        Launcher(tmp_path / "b", TRAIN, *flags, "--rank=1", env=SECRET, args=arguments) as second,
    ):
        second.wait_for("three", limit_s=50)
        second.signal(signal.SIGTERM)
        assert second.wait(40) == PREEMPTED, second.stderr
        assert first.wait(20) == PREEMPTED, first.stderr
    saved = list((tmp_path / "a" / "checkpoints").iterdir())
    assert len(saved) == 1  # worker 0's node has it
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.slow
def test_the_node_of_the_hung_rank_ends_the_job(tmp_path: Path) -> None:
    faults = {"FLEET_FAULTS": "step:hang:rank=1:step=5", **SECRET}
    flags = ("--nnodes=2", f"--master=127.0.0.1:{free_ports(1)[0]}", "--heartbeat_timeout=3")
    arguments = ("400", "none", "0", "0")
    with (
        Launcher(tmp_path / "a", TRAIN, *flags, "--rank=0", env=faults, args=arguments) as first,
        Launcher(tmp_path / "b", TRAIN, *flags, "--rank=1", env=faults, args=arguments) as second,
    ):
        assert second.wait(58) == 137, second.stderr
        assert first.wait(20) == 137, first.stderr
        assert "rank 1 has not finished step 6" in second.stderr
        assert "Another node ended the job" in first.stderr
        assert "Pod failed" not in first.stderr
