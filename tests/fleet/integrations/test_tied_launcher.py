"""A launcher that ends with the process that holds the other end of its standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = [sys.executable, "-m", "fleet.integrations._tied_launcher"]
ENDLESS = """
import os, time
from pathlib import Path

Path(f"pid.{os.getpid()}").touch()
time.sleep(60)
"""
HOLDER = """
import subprocess, sys, time

with open("said", "w") as said:
    subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True)
    time.sleep(60)
"""


def test_the_workers_end_when_the_holder_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    command = [*LAUNCHER, "--nproc_per_node=1", "--shutdown_timeout=1", "train.py"]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, *command], cwd=tmp_path)
    deadline = time.monotonic() + 30
    while not (pids := [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids, (tmp_path / "said").read_text()
    holder.kill()
    holder.wait()
    while "Exit code 143" not in (tmp_path / "said").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "Terminating with signal 15" in (tmp_path / "said").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_holder_that_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    done = subprocess.run([*LAUNCHER, "absent.py"], stdin=read_fd, cwd=tmp_path, timeout=60, capture_output=True)
    os.close(read_fd)
    assert done.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), done.stderr
    assert list(tmp_path.iterdir()) == []
