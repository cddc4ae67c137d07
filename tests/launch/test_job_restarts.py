"""Whole jobs on one node, continued: restarts, parameter servers, jobs inside jobs."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.launch.launcher import Launcher, wait_until_gone

RESTARTED = """
import os, sys, time
generation = os.environ["FLEET_GENERATION"]
print("start", generation, os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"], os.getpid(),
      time.time(), flush=True)
time.sleep(60)
"""


def kill_again_and_again(job: Launcher, kills: int, num_workers: int) -> tuple[list[float], set[str]]:
    delays: list[float] = []
    ports: set[str] = set()
    killed_at = 0.0
    for generation in range(kills + 1):
        found = [
            job.wait_for(rf"start {generation} {generation} (\d+) (\d+) ([\d.]+)\n", f"workerlog.{i}")
            for i in range(num_workers)
        ]
        ports.add(found[0][1])
        if generation:
            delays.append(float(min(match[3] for match in found)) - killed_at)
        if generation < kills:
            killed_at = time.time()
            os.kill(int(found[generation % num_workers][2]), signal.SIGKILL)
    return delays, ports


def test_killed_worker_restarts_the_group(tmp_path: Path) -> None:
    """Study 2.4: a new generation, a new store port."""
    with Launcher(tmp_path, RESTARTED, "--nproc_per_node=2", "--max_restart=3") as job:
        delays, ports = kill_again_and_again(job, 3, 2)
        assert len(ports) == 4
        job.signal(signal.SIGTERM)
        assert job.wait() == 143
    assert statistics.median(delays) < 1.5, "0.5 s on a quiet machine"


@pytest.mark.slow
def test_twenty_kills_in_a_row_are_survived(tmp_path: Path) -> None:
    """Study 2.4: 20 of 20."""
    with Launcher(tmp_path, RESTARTED, "--nproc_per_node=4", "--max_restart=20") as job:
        delays, ports = kill_again_and_again(job, 20, 4)
        assert len(delays) == 20
        assert len(ports) == 21
        job.signal(signal.SIGTERM)
        assert job.wait() == 143


def test_user_error_is_restarted_up_to_the_limit_then_returned(tmp_path: Path) -> None:
    script = "import os, sys; print('start', os.environ['FLEET_GENERATION'], flush=True); sys.exit(9)"
    with Launcher(tmp_path, script, "--max_restart=2") as job:
        assert job.wait() == 9
        assert re.findall(r"start (\d)", job.log()) == ["0", "1", "2"]
        assert re.findall(r"start (\d)", job.stdout) == ["0", "1", "2"]
        assert job.stderr.count("Pod failed") == 1


def test_no_restart_unless_asked_for(tmp_path: Path) -> None:
    with Launcher(tmp_path, "print('start', flush=True); raise SystemExit(2)") as job:
        assert job.wait() == 2
        assert job.log().count("start") == 1


PS = """
import os, sys, time
role = os.environ["TRAINING_ROLE"]
print(role, "starts", os.getpid(), flush=True)
if role == "PSERVER":
    {server}
{worker}
"""


def ps_script(server: str = "time.sleep(60)", worker: str = "time.sleep(0.3)") -> str:
    return PS.format(server=server, worker=worker)


def test_servers_are_ended_once_the_workers_have_exited(tmp_path: Path) -> None:
    """002-23: both lines, exit 0, though the server never returns; 002-24: file names."""
    with Launcher(tmp_path, ps_script(), "--server_num=1", "--worker_num=2") as job:
        assert job.wait() == 0
        first = job.stderr.index("all workers exit, going to finish parameter server and heter_worker.")
        assert job.stderr.index("all parameter server are killed.") > first
        assert "PSERVER starts" in job.log("serverlog.0")
        assert "TRAINER starts" in job.log("workerlog.1")
        assert "TRAINER starts" in job.stdout, "worker 0 is echoed, not the server"
        assert "PSERVER starts" not in job.stdout


def test_server_that_returns_by_itself_is_not_waited_for(tmp_path: Path) -> None:
    script = ps_script(server="time.sleep(0.8); print('returns', flush=True); sys.exit(0)", worker="time.sleep(0.5)")
    with Launcher(tmp_path, script, "--server_num=1", "--worker_num=1") as job:
        began = time.monotonic()
        assert job.wait() == 0
        assert time.monotonic() - began < 3.0
        assert "returns" in job.log("serverlog.0")
        assert "all parameter server are killed." in job.stderr


@pytest.mark.parametrize(
    ("server", "worker", "code", "who"),
    [
        ("time.sleep(60)", "sys.exit(6)", 6, "Worker 0 of 1"),
        ("time.sleep(0.3); sys.exit(8)", "time.sleep(60)", 8, "Server 0 of 1"),
    ],
)
def test_failed_worker_or_server_ends_the_job(tmp_path: Path, server: str, worker: str, code: int, who: str) -> None:
    with Launcher(tmp_path, ps_script(server, worker), "--server_num=1", "--worker_num=1") as job:
        assert job.wait() == code
        assert who in job.stderr


def test_job_inside_a_worker_falls_with_it(tmp_path: Path) -> None:
    """The mark is a path: the inner job's processes carry the outer mark too."""
    (tmp_path / "inner.py").write_text("import os, time\nprint('inner', os.getpid(), flush=True)\ntime.sleep(60)\n")
    script = """
import os, subprocess, sys
subprocess.run([sys.executable, "-m", "fleet.launch", "--log_dir", "inner_log", "inner.py"], start_new_session=True)
"""
    with Launcher(tmp_path, script) as job:
        pid = int(job.wait_for(r"inner (\d+)")[1])
        job.signal(signal.SIGKILL)
        assert wait_until_gone([pid], 1.0) == []
