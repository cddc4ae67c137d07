"""The report of a failure: who, how, last words, at most 30 lines (003 logs, study 2.4)."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.launch.plan.records import ProcessExit, ProcessSpec
from fleet.launch.processes.report import (
    choose_first_failure,
    failure_report,
    first_failure_line,
    hint_line,
    last_words,
    left_servers_line,
    looks_like_victim,
    oom_kill_count,
)


def ended(path: Path, rank: int = 3, code: int = 1, signal_name: str | None = None, text: str = "") -> ProcessExit:
    log_path = path / f"workerlog.{rank}"
    log_path.write_text(text)
    spec = ProcessSpec(
        role="worker",
        index=rank,
        local_index=rank,
        command=("python", "-u", "train.py", "--api_key", "k1"),
        environment={},
        log_path=log_path,
    )
    return ProcessExit(
        spec=spec, pid=4121, exit_code=code, signal_name=signal_name, lifetime_s=12.44, ended_at=float(rank)
    )


def test_first_failure_line(tmp_path: Path) -> None:
    line = first_failure_line(ended(tmp_path), role_size=8, host="gpu-2")
    assert line == (
        "Worker 3 of 8 (host gpu-2, pid 4121) was the first to fail: exit code 1 after 12.4 s. "
        f"Its last lines are in {tmp_path}/workerlog.3."
    )


def test_order_decides(tmp_path: Path) -> None:
    first, second = ended(tmp_path, 2, 5), ended(tmp_path, 0, 6)
    assert choose_first_failure([first, second]) is first


@pytest.mark.parametrize(
    ("code", "name", "text", "victim"),
    [
        (134, "SIGABRT", "", True),
        (1, None, "RuntimeError: [x] Connection closed by peer [127.0.0.1]:4", True),
        (1, None, "ValueError: boom", False),
        (137, "SIGKILL", "Connection reset by peer", False),
        (139, "SIGSEGV", "", False),
    ],
)
def test_victims(tmp_path: Path, code: int, name: str | None, text: str, victim: bool) -> None:
    assert looks_like_victim(ended(tmp_path, 0, code, name, text)) is victim


def test_cause_is_preferred_to_an_earlier_victim(tmp_path: Path) -> None:
    victim, cause = ended(tmp_path, 0, 134, "SIGABRT"), ended(tmp_path, 1, 1, None, "ValueError")
    assert choose_first_failure([victim, cause]) is cause
    assert choose_first_failure([victim, replace(victim, pid=5)]) is victim, "only victims: the first"


CHAIN = """step 1
Traceback (most recent call last):
  File "a.py", line 1, in <module>
OldError: caught long ago
step 2
Traceback (most recent call last):
  File "a.py", line 2, in f
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in g
RuntimeError: bad key
"""


def test_last_words_are_the_last_chain_of_tracebacks() -> None:
    words = last_words(CHAIN)
    assert words[0].startswith("Traceback")
    assert "KeyError: 'x'" in words
    assert words[-1] == "RuntimeError: bad key"
    assert not any("OldError" in word for word in words)


def test_last_words_without_a_traceback_are_the_last_lines() -> None:
    assert last_words("".join(f"{i}\n" for i in range(50)), 3) == ["47", "48", "49"]


def test_long_traceback_keeps_its_start_and_end() -> None:
    words = last_words("Traceback (most recent call last):\n" + "  frame\n" * 100 + "Error: end\n", 10)
    assert len(words) == 10
    assert words[0].startswith("Traceback")
    assert "93 lines left out" in words[1]
    assert words[-1] == "Error: end"


def test_control_characters_cannot_drive_the_terminal() -> None:
    assert last_words("\x1b[2Jgone\x07") == ["\\x1b[2Jgone\\x07"]


def test_report_is_short_whatever_the_log_holds(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\n" + ("  " + "y" * 5000 + "\n") * 500 + "Error: z\n"
    report = failure_report(ended(tmp_path, 3, 137, "SIGKILL", text), role_size=8, host="h")
    lines = [line for _, part in report for line in part.splitlines()]
    assert len(lines) <= 29
    assert max(map(len, lines)) < 600
    assert report[0] == ("INFO", "Pod failed")
    assert report[1][1].splitlines()[0] == "Container failed !!!"


def test_secret_arguments_are_hidden(tmp_path: Path) -> None:
    report = failure_report(ended(tmp_path), role_size=1, host="h")
    assert not any("k1" in text for _, text in report)


def test_hint_for_sigkill_only(tmp_path: Path) -> None:
    assert hint_line(ended(tmp_path, 0, 1)) is None
    assert "memory" in (hint_line(ended(tmp_path, 0, 137, "SIGKILL")) or "")
    assert "ended 2 process(es)" in (hint_line(ended(tmp_path, 0, 137, "SIGKILL"), 2) or "")


def test_an_abort_of_gloo_is_explained(tmp_path: Path) -> None:
    """Issue 9, section 2: a worker that left out a step() under sharding stage 1 ended in gloo's words alone."""
    text = "terminate called\n what(): [enforce fail] Is there a distributed collective mismatch in your code?"
    report = [line for _, line in failure_report(ended(tmp_path, 0, 134, "SIGABRT", text), role_size=2, host="h")]
    assert any("was left out on some of them" in line for line in report)
    assert hint_line(ended(tmp_path, 0, 134, "SIGABRT"), words=["Aborted"]) is None


def test_a_full_log_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that printed ended with 1, and its traceback found no room in its log."""
    failed = ended(tmp_path, 0, 1, None, "half a line")
    assert not any("log folder" in text for _, text in failure_report(failed, role_size=1, host="h"))

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    (line,) = [text for _, text in failure_report(failed, role_size=1, host="h") if "log folder" in text]
    assert line.startswith(f"Nothing more can be written in the log folder {tmp_path} (No space left on device)")


def test_a_worker_that_left_its_servers_waiting_is_named(tmp_path: Path) -> None:
    text = "Worker 1 ended without fleet.stop_worker(): what it has not sent is lost"
    left = ended(tmp_path, 1, 0, None, text)
    line = left_servers_line(left, [0, 2], 0)
    assert line is not None
    assert line.startswith("worker 1 ended without fleet.stop_worker(), with exit code 0, while workers 0, 2 of this")
    assert left_servers_line(left, [], 0) is None, "nobody waits any more"
    assert left_servers_line(left, [0], len(text)) is None, "an earlier run wrote it"
    assert left_servers_line(ended(tmp_path, 1, 0, None, "done"), [0], 0) is None


def test_oom_kill_count_is_a_number() -> None:
    assert oom_kill_count() >= 0


def test_workers_that_had_ended_well_are_named(tmp_path: Path) -> None:
    """Uneven batches: rank 1 has none left, and rank 0 waits for it."""
    first = replace(ended(tmp_path, 0), ended_at=20.0)
    well = replace(ended(tmp_path, 1, 0), ended_at=16.8, lifetime_s=12.0, steps=100)
    report = failure_report(first, role_size=2, host="h", ended_before=[well])
    (line,) = [text for _, text in report if "ended normally" in text]
    assert line.startswith(
        "Worker 1 ended normally (exit code 0) 3.2 s earlier, after 12.0 s and 100 steps; worker 0 "
        "still ran. If it waited for the others: do all workers have equally many batches?"
    )
    (same,) = [
        t for _, t in failure_report(first, role_size=2, host="h", ended_before=[replace(well, ended_at=20.5)])[3:4]
    ]
    assert "at about the same time" in same
    assert "drop_last=True" in line
    assert "Join" in line
    assert len(failure_report(first, role_size=2, host="h")) == len(report) - 1
