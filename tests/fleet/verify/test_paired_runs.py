"""Runs have folders of their own, and arguments that leave the folder still reach what they name."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.verify.paired_runs import (
    VerifyRequest,
    _frame,
    _has_ended,
    _is_ready,
    _own_folder,
    _plan,
    _reaching,
    process_starter,
)


def test_what_a_run_writes_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "data.txt").write_text("x")
    made = _own_folder(tmp_path / "user", tmp_path / "run")
    (made / "checkpoint.pt").write_text("y")
    assert (made / "data.txt").read_text() == "x"
    assert os.listdir(tmp_path / "user") == ["data.txt"]


def test_arguments_that_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "data.txt").write_text("x")
    monkeypatch.chdir(tmp_path / "user")
    assert _reaching("--data=../data.txt") == f"--data={tmp_path.resolve() / 'data.txt'}"
    assert _reaching("--epochs=2") == "--epochs=2"


def test_a_line_of_a_stack_is_a_place() -> None:
    assert _frame('  File "train.py", line 12 in main') == "train.py:12"


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_python_that_does_not_start_says_why(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(FleetError, match="no torch here"), process_starter(tmp_path) as start:
        start({"a plan": "x" * length})


def test_processes_end_with_their_starter(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\n\nprint('sleeps', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "rank0.log").touch()
    plan = _plan(VerifyRequest(script=script), tmp_path, 0, [])
    plan |= {"place": str(tmp_path), "environment": {}, "scheduled": {}, "synced": False, "noise": 0.0, "beside": ""}
    plan |= {"alike": "", "in_turn": False, "replicas": 1}
    with process_starter(tmp_path) as start:
        process = start(plan)
        while "sleeps" not in (tmp_path / "rank0.log").read_text():
            assert not _has_ended(process)
            time.sleep(0.05)
    assert _has_ended(process)


_BUSY_THREAD = """
import threading
thread = threading.Thread(target=exec, args=("while True: pass",))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("text", "is_ready"),
    [("while True: pass", True), (_BUSY_THREAD, True), ("import time; time.sleep(60)", False)],
    ids=["main thread", "other thread", "none"],
)
def test_a_process_without_a_core_does_not_wait(text: str, is_ready: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", f"print(flush=True)\n{text}"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 10
        while _is_ready(process.pid) is not is_ready and time.monotonic() < deadline:
            time.sleep(0.01)
        found = [_is_ready(process.pid) for _ in range(20)]
        process.kill()
    assert found == [is_ready] * 20
