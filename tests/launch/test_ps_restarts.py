"""A parameter-server job with --max_restart: a failed process alone is started again, the others go on."""

from __future__ import annotations

from pathlib import Path

from tests.launch.launcher import Launcher

SCRIPT = """
import os, pathlib, sys, time
role, port = os.environ["TRAINING_ROLE"], os.environ.get("PADDLE_PORT")
print(role, "starts", os.environ.get("FLEET_PS_FOLDER"), port, flush=True)
def first_time(name):
    path = pathlib.Path(name)
    known = path.exists()
    path.touch()
    return not known
if role == "PSERVER":
    if first_time("server"):
        time.sleep(0.2)
        sys.exit(5)
    time.sleep(60)
if os.environ["PADDLE_TRAINER_ID"] == "0" and first_time("worker"):
    sys.exit(3)
time.sleep(1.5)
"""


def test_failed_server_and_worker_are_started_again_alone(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--server_num=1", "--worker_num=2", "--max_restart=2") as job:
        assert job.wait() == 0, job.stderr
        server = [line.split() for line in job.log("serverlog.0").splitlines() if "PSERVER starts" in line]
        assert len(server) == 2
        assert server[0] == server[1], "the same port, and the same folder for what it must remember"
        assert server[0][2].endswith("servers")
        assert job.log("workerlog.0").count("TRAINER starts") == job.stdout.count("TRAINER starts") == 2
        assert job.log("workerlog.1").count("TRAINER starts") == 1
        assert "server 0 ended with code 5 and is started again; " in job.stderr
        assert "worker 0 ended with code 3 and is started again; " in job.stderr
        assert not Path(server[0][2]).exists()


def test_more_failures_than_restarts_end_the_job_with_the_code(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--server_num=1", "--worker_num=2", "--max_restart=1") as job:
        assert job.wait() in (3, 5)
        assert job.stderr.count("is started again; 0 restart(s) left") == 1


def test_without_the_flag_nothing_is_started_again_or_kept(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--server_num=1", "--worker_num=2") as job:
        assert job.wait() in (3, 5)
        assert "starts None" in job.log("serverlog.0")
