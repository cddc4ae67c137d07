"""A view of a job: states, steps and rates of its processes, failures, and what stays when they have ended."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fleet.launch.page import job_view, page_folder
from fleet.launch.page.job_view import BAD, GOOD, IDLE, JobView
from fleet.launch.processes.worker_file import BEAT_NS, PAUSED, STEP
from tests.helpers.paged import made_end, made_process, made_view, worker_record


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobView:
    """The view of a job that has begun, gathered anew at each look."""
    monkeypatch.setattr(job_view, "_FRESH_S", 0.0)
    made = made_view(tmp_path)
    made.begin("10.0.0.7", "node 0 of 1")
    return made


def test_states(view: JobView, tmp_path: Path) -> None:
    kinds = ("starting", "running", "paused", "silent", "server", "ended", "failed")
    for rank, kind in enumerate(kinds):
        role = "server" if kind == "server" else "worker"
        process, file = made_process(tmp_path, rank, None if kind == "starting" else 5, role)
        view.started(process, file)
        if file is not None and kind == "paused":
            file.words[PAUSED] = 1
        if file is not None and kind == "silent":
            file.words[BEAT_NS] = time.monotonic_ns() - 25_000_000_000
        if kind in ("ended", "failed"):
            made_end(process, int(kind == "failed") * 3)
    rows = view.rows()
    assert [row.state.split(":")[0].split(" for")[0] for row in rows] == [
        "starting", "running", "paused", "silent", "running", "ended", "failed"
    ]  # fmt: skip
    assert [row.tone for row in rows] == [IDLE, GOOD, IDLE, BAD, GOOD, IDLE, BAD]
    assert rows[3].state in ("silent for 25 s", "silent for 26 s")
    assert rows[6].state == "failed: exit code 3"
    assert {row.host for row in rows} == {"10.0.0.7"}
    assert (rows[1].memory_mib or 0) > 1
    assert rows[5].memory_mib is None


def test_steps_values_and_rates(view: JobView, tmp_path: Path) -> None:
    process, file = made_process(tmp_path, 0, 10)
    assert file is not None
    view.started(process, file)
    worker_record(tmp_path, 0, 10, **{"rate/steps_per_s": 4.0, "train/loss": 0.5, "loss": 0.25})
    (row,) = view.rows()
    assert (row.step, row.loss, row.key) == (10, 0.25, "worker.0")
    began = time.monotonic()
    time.sleep(0.05)
    file.words[STEP] = 30
    (row,) = view.rows()
    assert row.step == 30
    assert row.rate is not None
    assert 0 < row.rate <= 20 / 0.05
    assert row.rate >= 20 / (time.monotonic() - began + 0.1)


def test_before_two_looks_the_rate_is_what_the_worker_measured(tmp_path: Path) -> None:
    view = made_view(tmp_path)
    view.begin("h", "node 0 of 1")
    view.started(*made_process(tmp_path, 0, 10))
    worker_record(tmp_path, 0, 10, **{"rate/steps_per_s": 4.0})
    assert view.rows()[0].rate == 4.0


def test_what_has_ended_stays_until_the_next_generation(view: JobView, tmp_path: Path) -> None:
    process, file = made_process(tmp_path, 0, 7)
    assert file is not None
    view.started(process, file)
    view.rows()
    end = made_end(process, 1)
    view.forget()
    file.close()
    view.failed(end, "the report", restarts=True)
    assert [(row.state, row.step) for row in view.rows()] == [("failed: exit code 1", 7)]
    assert view.state == "restarting"
    worker_record(tmp_path, 0, 7, loss=1.0)
    assert view.rows()[0].loss == 1.0
    os.utime(tmp_path / "worker.0.json", (time.time() - 1, time.time() - 1))
    view.begin("10.0.0.7", "node 0 of 1")
    assert view.rows() == []
    view.started(*made_process(tmp_path, 0, 1))
    assert view.rows()[0].loss is None  # another worker of this rank wrote it
    worker_record(tmp_path, 0, 1, loss=2.0)
    assert view.rows()[0].loss == 2.0
    assert [(one.what, one.report) for one in view.failures()] == [
        ("worker 0 failed, exit code 1; the job starts again", "the report")
    ]


def test_a_replaced_process_is_a_failure_with_its_last_words(view: JobView, tmp_path: Path) -> None:
    process, _ = made_process(tmp_path, 0, role="server")
    process.spec.log_path.write_text("old\nTraceback (most recent call last):\nValueError: x\n")
    view.replaced(made_end(process, 1), 4)
    (failure,) = view.failures()
    assert failure.what == "server 0 failed, exit code 1; it is started again"
    assert failure.report == "Traceback (most recent call last):\nValueError: x"
    assert view.state == "running"
    view.ended(0)
    assert view.state == "ended with exit code 0"


def test_checkpoints_of_the_first_worker_that_has_some(view: JobView, tmp_path: Path) -> None:
    for rank in range(2):
        view.started(*made_process(tmp_path, rank, 1))
    worker_record(tmp_path, 0, 1)
    assert view.checkpoints() == []
    (tmp_path / "save" / "step-0000000001").mkdir(parents=True)
    (tmp_path / "save" / "step-0000000001" / "index.json").write_text("{}")
    worker_record(tmp_path, 1, 1, tmp_path / "save")
    assert [one.path.name for one in view.checkpoints()] == ["step-0000000001"]


def test_files_that_do_not_answer_hold_up_no_supervision(
    view: JobView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a failed worker was started again when the folder of the checkpoints answered, or never."""
    process, file = made_process(tmp_path, 0, 1)
    view.started(process, file)
    stalled, hung = tmp_path / "stalled", threading.Event()
    worker_record(tmp_path, 0, 1, stalled)
    monkeypatch.setattr(page_folder, "_ANSWER_S", 0.1)
    usual_open, usual_list = os.open, os.listdir

    def slow_list(path: Any = ".") -> Any:
        return hung.wait(60) and [] if path == stalled else usual_list(path)

    def slow_open(path: Any, *args: Any, **options: Any) -> int:
        is_slow = str(path).startswith(str(tmp_path)) and threading.current_thread() is not threading.main_thread()
        return hung.wait(60) and usual_open(path, *args, **options) if is_slow else usual_open(path, *args, **options)

    monkeypatch.setattr(os, "listdir", slow_list)
    for _ in range(20):  # of as many browsers
        with pytest.raises(TimeoutError, match=r"stalled has not answered within 0\.1 s"):
            view.checkpoints()
    assert sum(thread.name == "page checkpoints" for thread in threading.enumerate()) == 1
    (tmp_path / "server.0.0.json").write_text("{}")
    monkeypatch.setattr(os, "open", slow_open)
    looking = threading.Thread(target=view.servers)
    looking.start()
    time.sleep(0.05)
    began = time.monotonic()
    view.replaced(made_end(process, 3), 0)
    view.started(*made_process(tmp_path, 0, 1))
    view.answer()
    view.forget()
    view.failed(made_end(process, 3), "the report", restarts=True)
    view.begin("10.0.0.7", "node 0 of 1")
    view.ended(0)
    assert time.monotonic() - began < 5
    assert looking.is_alive()
    hung.set()
    looking.join(60)
    assert not looking.is_alive()
