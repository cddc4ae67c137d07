"""What the launcher shares with its workers: made before they start, gone afterwards, asked in the right way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.launch.cli.flags import HEALTH_FLAGS
from fleet.launch.plan.records import ProcessSpec
from fleet.launch.processes import watch as _heartbeat
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.stacks import Frame, Stack
from fleet.launch.processes.watch import (
    FILE_VARIABLE,
    FIRST_STEP_FACTOR,
    Heartbeats,
    WorkerWatch,
    open_watch,
    processor_s,
    slow_line,
)
from fleet.launch.processes.worker_file import BEAT_NS, OWN_NS, OWN_STEPS, PAUSED, PID, STEP, STOP_ASKED, WorkerFile
from tests.helpers.launching import plan, read


def test_the_heartbeat_is_on_by_default_and_follows_the_timeout_of_collective_calls() -> None:
    """Decision 16."""
    config = read("--nproc_per_node=2")
    assert (config.processes.heartbeat_timeout_s, config.processes.heartbeat_is_default) == (1800.0, True)
    assert all(FILE_VARIABLE in spec.environment for spec in plan(config))
    assert read(env={"PADDLE_PG_TIMEOUT": "7200000"}).processes.heartbeat_timeout_s == 7200
    assert read(env={"PADDLE_PG_TIMEOUT": "5000"}).processes.heartbeat_timeout_s == 1800
    asked = read("--heartbeat_timeout=60", env={"PADDLE_PG_TIMEOUT": "7200000"})
    assert (asked.processes.heartbeat_timeout_s, asked.processes.heartbeat_is_default) == (60.0, False)


def test_switched_off_nothing_is_shared() -> None:
    config = read("--nproc_per_node=2", "--heartbeat_timeout=0")
    assert open_watch(config, LaunchLog(), 1) is None
    assert all(FILE_VARIABLE not in spec.environment for spec in plan(config))


@pytest.mark.parametrize(("name", "variable"), [(row[0], row[3]["env"][0]) for row in HEALTH_FLAGS])
def test_each_flag_and_its_twin_give_every_worker_a_file(name: str, variable: str) -> None:
    off = () if name == "heartbeat_timeout" else ("--heartbeat_timeout=0",)
    by_variable = read("--nproc_per_node=2", *off, env={variable: "2.5"})
    for config in (read(f"--{name}=2.5", "--nproc_per_node=2", *off), by_variable):
        files = [spec.environment[FILE_VARIABLE] for spec in plan(config)]
        assert len(set(files)) == 2
        assert all(Path(file).parent == config.pod.scratch_path for file in files)
        watch = open_watch(config, LaunchLog(), 1)
        assert watch is not None
        assert (watch.period_s is not None) == (name == "heartbeat_timeout")
        assert watch.saves_on([signal.SIGTERM]) == (name == "preempt_grace")
        assert not watch.saves_on([signal.SIGINT])
        assert not watch.saves_on([signal.SIGTERM, signal.SIGINT])


def test_workers_that_listen_are_asked_in_their_files_and_others_by_the_signal(tmp_path: Path) -> None:
    watch = WorkerWatch(heartbeat_s=0, preempt_grace_s=5, is_alone=True, log=LaunchLog())
    told: list[int] = []
    workers: list[Any] = []
    for rank in range(2):
        path = tmp_path / f"worker.{rank}"
        spec = ProcessSpec(
            role="worker",
            index=rank,
            local_index=rank,
            command=("x",),
            environment={FILE_VARIABLE: f"{path}"},
            log_path=tmp_path / "log",
        )
        watch.prepare(spec)
        workers.append(SimpleNamespace(spec=spec, terminate=lambda rank=rank: told.append(rank)))
    listening = WorkerFile(tmp_path / "worker.0")
    listening.words[PID] = 1
    watch.ask_to_stop(workers)
    assert listening.words[STOP_ASKED] == 1
    assert told == [1]
    watch.close()
    assert list(tmp_path.iterdir()) == []
    listening.close()


OWN = Stack((Frame("/code/train.py", 33, "load"),), "own")
WAITING = Stack((Frame("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce"), *OWN.frames), "waiting")
NOW_NS = time.monotonic_ns


class Watched:
    """Heartbeats over made-up workers; each is given as (step, seconds of silence, stack)."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        alone: bool = True,
        limit_s: float = 10.0,
        lenient: bool = False,
    ):
        self.beats = Heartbeats(limit_s, LaunchLog(), is_alone=alone, lenient=lenient)
        self.files: list[WorkerFile] = []
        self.stacks: dict[int, Stack] = {}
        self.folder = folder
        monkeypatch.setattr(_heartbeat, "ask_for_stacks", lambda workers: {pid: self.stacks[pid] for pid, _ in workers})
        monkeypatch.setattr(_heartbeat, "is_stopped", lambda pid: False)

    def add(self, step: int, silent_s: float, stack: Stack = OWN) -> WorkerFile:
        rank = len(self.files)
        file = WorkerFile.create(self.folder / f"worker.{rank}")
        file.begin(1)
        file.words[STEP] = step
        file.words[BEAT_NS] = NOW_NS() - int(silent_s * 1e9)
        process: Any = SimpleNamespace(pid=rank, ended=None, spec=SimpleNamespace(index=rank), kill_reason="")
        self.beats.add(process, file)
        self.stacks[rank] = stack
        self.files.append(file)
        return file

    def check(self) -> int | None:
        """The rank that is to be ended."""
        found = self.beats.check()
        return None if found is None else found.spec.index


def test_nobody_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    watched.add(5, 9.0)
    watched.add(0, 9.0 * FIRST_STEP_FACTOR)  # the first step may take longer
    watched.add(5, 99.0).words[PAUSED] = 1
    WorkerFile.create(tmp_path / "not begun")
    assert watched.check() is None


def test_the_rank_that_the_others_wait_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    watched.add(119, 30.2, WAITING)
    watched.add(119, 30.1, OWN)
    watched.add(119, 30.3, WAITING)
    assert watched.check() == 1
    said = capsys.readouterr().err
    assert "rank 1 has not finished step 120 for 30 s; it is at /code/train.py:33 in load" in said
    assert "rank 0 waits for other ranks in step 120; it is at /code/train.py:33 in load (inside" in said
    assert said.count("Stack of rank") == 3
    reason = watched.beats._pulses[1].process.kill_reason
    assert "step 120 for 30 s, and --heartbeat_timeout is" in reason
    assert "let it call fleet.heartbeat()" in reason


def test_the_rank_that_is_a_step_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    watched.add(6, 12.0, OWN)
    watched.add(5, 11.0, OWN)
    assert watched.check() == 1


def test_a_first_step_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch, limit_s=1.0)
    watched.add(0, FIRST_STEP_FACTOR + 0.5)
    assert watched.check() == 0


def test_where_all_wait_other_nodes_speak_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, monkeypatch, alone=False)
    watched.add(5, 20.0, WAITING)
    monkeypatch.setattr(_heartbeat, "_DEFER_S", 0.2)
    assert watched.check() is None
    assert watched.check() is None
    time.sleep(0.25)
    assert watched.check() == 0
    assert "network or another node" in capsys.readouterr().err


def test_on_one_node_the_network_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    for _ in range(2):
        watched.add(5, 20.0, WAITING)
    assert watched.check() == 0
    said = capsys.readouterr().err
    assert "all of them are here: they are in different calls" in said
    assert "network" not in said


def test_a_rank_that_ended_well_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    for _ in range(2):
        watched.add(5, 20.0, WAITING)
    ended: Any = SimpleNamespace(exit_code=0, ended_at=time.monotonic() - 19.0, spec=SimpleNamespace(index=1))
    watched.beats._pulses[1].process.ended = ended
    assert watched.check() == 0
    said = capsys.readouterr().err
    assert "rank 1 ended normally (exit code 0) 19 s ago." in said
    assert "do all workers have equally many batches?" in said


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Processor time by pid; no waiting between two looks."""
    used: dict[int, float] = {0: 0.0, 1: 0.0}
    monkeypatch.setattr(_heartbeat, "processor_s", lambda pid: used[pid])
    monkeypatch.setattr(_heartbeat, "_STILL_S", 0.1)
    return used


def test_by_default_only_workers_that_all_wait_and_do_nothing_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computing: dict[int, float]
) -> None:
    watched = Watched(tmp_path, monkeypatch, lenient=True)
    watched.add(5, 20.0, WAITING)
    watched.add(5, 20.0, WAITING)
    for _ in range(2):  # they compute between the looks: an evaluation with an exchange in each batch
        assert watched.check() is None
        computing[1] += 1.0
        time.sleep(0.12)
    assert watched.check() is None
    time.sleep(0.12)
    assert watched.check() == 0
    reason = watched.beats._pulses[0].process.kill_reason
    assert "All workers of this node waited for others, and none computed." in reason


@pytest.mark.usefixtures("computing")
def test_by_default_a_worker_that_is_busy_is_reported_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long evaluation or save of rank 1, for which rank 0 waits; then a worker that somebody has stopped."""
    watched = Watched(tmp_path, monkeypatch, lenient=True, limit_s=0.3)
    watched.add(5, 20.0, WAITING)
    watched.add(5, 20.0, OWN)
    for _ in range(4):
        assert watched.check() is None
        time.sleep(0.1)
    said = capsys.readouterr().err
    assert said.count("has not finished a step") == 1
    assert "rank 1 has not finished a step for 20 s; it is at /code/train.py:33 in load. It goes on" in said
    watched.stacks[1] = WAITING
    monkeypatch.setattr(_heartbeat, "is_stopped", lambda pid: pid == 1)
    for _ in range(4):
        assert watched.check() is None
        time.sleep(0.1)


@pytest.mark.usefixtures("computing")
def test_by_default_nodes_wait_for_each_other_as_long_as_a_collective_call_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch, lenient=True, alone=False, limit_s=0.6)
    monkeypatch.setattr(_heartbeat, "_DEFER_S", 0.0)
    watched.add(5, 20.0, WAITING)
    began = time.monotonic()
    while watched.check() is None:
        time.sleep(0.02)
        assert time.monotonic() - began < 20
    assert time.monotonic() - began >= 0.6


def test_processor_time() -> None:
    before = processor_s(os.getpid())
    while processor_s(os.getpid()) < before + 0.05:
        sum(range(1000))
    assert processor_s(2**22 + 1) == 0.0


@pytest.mark.parametrize(
    ("times", "slow"), [({0: 1.0, 1: 1.0, 2: 1.6}, 2), ({0: 1.0, 1: 1.4}, None), ({0: 9.0}, None), ({}, None)]
)
def test_slow(times: dict[int, float], slow: int | None) -> None:
    line = slow_line(times)
    assert line.startswith(f"rank {slow} is slow") if slow is not None else line == ""


def test_slow_ranks_are_reported_by_their_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    for own_s in (0.1, 0.1, 0.3):
        file = watched.add(40, 0.0)
        file.words[OWN_STEPS], file.words[OWN_NS] = 40, int(40 * own_s * 1e9)
    monkeypatch.setattr(_heartbeat, "_SLOW_PERIOD_S", 0.0)
    assert watched.check() is None
    assert "rank 2 is slow: its own work takes 0.3 s a step, that of the others 0.1 s" in capsys.readouterr().err
    assert watched.check() is None  # no step since
    assert capsys.readouterr().err == ""
