"""Stacks are asked for by one thread and answered by another; a reason takes their place where there are none."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fleet.launch.page.job_view import StackRequests
from fleet.launch.processes.stacks import is_stopped
from fleet.launch.processes.worker_file import SHOWS_STACKS, WorkerFile


def answered(requests: StackRequests, name: str, live: dict[str, tuple[int, WorkerFile | None]]) -> str:
    """Returns the answer, given by this thread as soon as it hears of the question."""
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(requests.ask(name, 60.0)))
    asking.start()
    assert select.select([requests], [], [], 60.0)[0]
    began = time.monotonic()
    requests.answer(live)
    assert time.monotonic() - began < 0.5  # it waits for nothing, or a failed process would be started again later
    asking.join(60)
    assert not select.select([requests], [], [], 0)[0]
    return found[0]


def test_reasons(tmp_path: Path) -> None:
    requests = StackRequests()
    file = WorkerFile.create(tmp_path / "file")
    assert answered(requests, "worker 0", {}) == "worker 0 does not run."
    assert "shows no stacks: only workers do" in answered(requests, "server 0", {"server 0": (os.getpid(), None)})
    assert "has not called fleet.init() yet" in answered(requests, "worker 0", {"worker 0": (os.getpid(), file)})
    file.close()
    requests.close_pipe()


def test_a_stopped_process_stays_stopped(tmp_path: Path) -> None:
    requests = StackRequests()
    file = WorkerFile.create(tmp_path / "file")
    file.words[SHOWS_STACKS] = 1
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        said = answered(requests, "worker 0", {"worker 0": (process.pid, file)})
        assert "is stopped by a signal or a debugger" in said
        assert is_stopped(process.pid)
        process.kill()
    file.close()
    requests.close_pipe()


def test_who_gets_no_answer_says_so() -> None:
    requests = StackRequests()
    assert requests.ask("worker 0", 0.05).startswith("No answer within 0.05 s")
    requests.close_pipe()


def test_stacks_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fleet.launch.page.job_view as module
    from fleet.launch.processes.stacks import AskedWorker, Frame, Stack

    file = WorkerFile.create(tmp_path / "file")
    file.words[SHOWS_STACKS] = 1
    whole = (Frame("train.py", 3, "<module>"),)
    asked = AskedWorker(tmp_path / "stacks", 0, 0)
    monkeypatch.setattr(module, "signal_for_stacks", lambda files: {pid: asked for pid, _ in files})
    monkeypatch.setattr(module, "wait_for_stacks", lambda given: {pid: Stack(whole, f"of {pid}\n") for pid in given})
    requests = StackRequests()
    assert answered(requests, "worker 1", {"worker 1": (17, file)}) == "of 17\n"
    monkeypatch.setattr(module, "wait_for_stacks", lambda given: {pid: Stack((), f"of {pid}\n") for pid in given})
    assert answered(requests, "worker 1", {"worker 1": (17, file)}).startswith("of 17\n[cut off")
    monkeypatch.setattr(module, "wait_for_stacks", lambda given: {pid: Stack() for pid in given})
    assert (
        answered(requests, "worker 1", {"worker 1": (17, file)})
        == "worker 1 (process 17) wrote no stack within a second."
    )
    file.close()
    requests.close_pipe()
