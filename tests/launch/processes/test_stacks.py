"""Stacks are read as faulthandler writes them, and say where a worker is and whether it waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.launch.processes.stacks import Frame, Stack, ask_for_stacks, is_stopped, read_stack
from fleet.launch.processes.worker_file import PID, WorkerFile
from tests.helpers.sources import ROOT

TEXT = """\
Thread 0x00000000000000aa (most recent call first):
  File "/usr/lib/python3/threading.py", line 3 in wait

Current thread 0x00000000000000bb [main] (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 90 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 80 in wrapper
  File "/code/train.py", line 33 in train_epoch
  File "/code/train.py", line 60 in <module>
"""


@pytest.mark.parametrize("thread", [0xBB, 0xAA, 0xCC])
def test_the_main_thread_is_found(thread: int, tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text("old\n" + TEXT)
    stack = read_stack(path, 4, thread)
    assert stack.waits == (thread != 0xAA)
    if thread == 0xBB:
        assert stack.place.startswith("/code/train.py:33 in train_epoch (inside ")
        assert len(stack.frames) == 4
    assert stack.text == TEXT
    assert stack.is_whole == (thread != 0xAA)


def test_a_stack_that_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text(TEXT[: TEXT.index(", line 60")])
    assert not read_stack(path, 0, 0xBB).is_whole
    assert not Stack().is_whole


def test_a_stack_that_is_not_there() -> None:
    assert read_stack(Path("/nowhere"), 0, 1) == Stack()
    assert Stack().place == ""
    assert not Stack().waits
    assert Stack((Frame("/x/fleet/job/roll_call.py", 3, "_wait_for"),)).waits  # not the one that the others wait for
    assert Stack((Frame("/code/a.py", 3, "f"),)).place == "/code/a.py:3 in f"


WORKER = """
import sys, threading, time
from pathlib import Path
from fleet.elastic.health import Beat
from fleet.launch.processes.worker_file import WorkerFile
beat = Beat(WorkerFile(Path(sys.argv[1])))
def deep():
    sum(range(10**12)) if sys.argv[2] == "c code" else time.sleep(100)
deep()
"""


@pytest.mark.parametrize(
    "how", ["c code", *(pytest.param(how, marks=pytest.mark.slow) for how in ("asleep", "stopped"))]
)
def test_a_worker_shows_its_stack_whatever_it_does(how: str, tmp_path: Path) -> None:
    """004: also in C code that holds the interpreter's lock, and stopped by SIGSTOP."""
    file = WorkerFile.create(tmp_path / "worker.0")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(file.path), how], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not file.words[PID] and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        if how == "stopped":
            worker.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            assert is_stopped(worker.pid)
        found = ask_for_stacks([(worker.pid, file)], limit_s=5.0)
        assert found[worker.pid].frames[0].function == "deep"
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
        file.close()
