"""A job with --page: where its page is, what it shows while it runs and fails, and what stays when it has ended."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import pytest

from fleet.errors import ConfigError
from tests.helpers.launching import plan, read
from tests.helpers.paged import ask
from tests.launch.launcher import Launcher

WAITS = """
import os, sys, time
assert os.path.isdir(os.environ["FLEET_PAGE_FOLDER"])
assert "FLEET_PAGE" not in os.environ
print("worker", os.environ["PADDLE_TRAINER_ID"], "runs", flush=True)
until = time.monotonic() + 60
while not os.path.exists("go" + os.environ["FLEET_GENERATION"]) and time.monotonic() < until:
    time.sleep(0.02)
if os.environ["FLEET_GENERATION"] == "0" and os.environ["PADDLE_TRAINER_ID"] == "1":
    sys.exit("a planned failure")
"""


class Shown:
    """The page of a launcher, by the line that it printed."""

    def __init__(self, job: Launcher) -> None:
        found = job.wait_for(r"Page of the job: http://127\.0\.0\.1:(\d+)/ .*\$\(cat ([^\s)]+)\)", "stdout")
        self.port, path = int(found[1]), Path(found[2])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        self.token = path.read_text().strip()

    def text(self, path: str = "/") -> str:
        """Returns a page."""
        status, _, text = ask(self, path, {"Authorization": f"Bearer {self.token}"})  # type: ignore[arg-type]
        assert status == 200
        return text


def test_a_job_shows_its_workers_its_failure_and_its_logs(tmp_path: Path) -> None:
    with Launcher(tmp_path, WAITS, "--nproc_per_node=2", "--max_restart=1", env={"FLEET_PAGE": "0"}) as job:
        shown = Shown(job)
        job.wait_for("worker 1 runs", "workerlog.1")
        text = shown.text()
        assert text.count("<tr id=") == 2
        assert "worker 1 runs" in shown.text("/process/worker.1")
        assert shown.token not in job.stderr + job.stdout + "".join(p.read_text() for p in (tmp_path / "log").iterdir())
        (tmp_path / "go0").touch()
        job.wait_for("Restart 1 of 1", "stderr")
        text = shown.text()
        assert "worker 1 failed, exit code 1; the job starts again" in text
        assert "a planned failure" in text
        (tmp_path / "go1").touch()
        assert job.wait() == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", shown.port))


def test_stacks_are_asked_for_while_the_job_runs(tmp_path: Path) -> None:
    """The supervising thread answers though it waits for nothing but the ends of the workers."""
    with Launcher(tmp_path, WAITS, "--nproc_per_node=1", "--page=0", "--heartbeat_timeout=0") as job:
        shown = Shown(job)
        job.wait_for("worker 0 runs")
        headers = {"Authorization": f"Bearer {shown.token}"}
        status, _, text = ask(shown, "/process/worker.0/stacks", headers, "POST")  # type: ignore[arg-type]
        assert status == 200
        assert "has not called fleet.init() yet" in text
        (tmp_path / "go0").touch()
        assert job.wait() == 0


def test_a_taken_port_ends_the_launcher_before_any_worker(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Launcher(tmp_path, WAITS, "--nproc_per_node=1", f"--page={port}") as job:
            assert job.wait() != 0
            assert f"--page={port}: the page cannot listen on 127.0.0.1:{port}" in job.stderr
            assert not (tmp_path / "log" / "workerlog.0").exists()


@pytest.mark.parametrize("text", ["-1", "65536", "x", "80.5"])
def test_wrong_ports(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("--page is ")):
        read(f"--page={text}")


def test_without_a_page_no_process_writes_for_one() -> None:
    assert all("FLEET_PAGE_FOLDER" not in spec.environment for spec in plan(read("--nproc_per_node=2")))
    config = read("--server_num=1", "--worker_num=1", "--page=0", "--heartbeat_timeout=0")
    assert {spec.environment["FLEET_PAGE_FOLDER"] for spec in plan(config)} == {os.fspath(config.page.folder)}
    assert config.watches_workers
