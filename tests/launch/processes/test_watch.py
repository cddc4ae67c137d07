"""What the launcher shares with its workers: made before they start, gone afterwards, asked in the right way."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.launch.cli.flags import HEALTH_FLAGS
from fleet.launch.plan.records import ProcessSpec
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.watch import FILE_VARIABLE, WorkerWatch, open_watch
from fleet.launch.processes.worker_file import PID, STOP_ASKED, WorkerFile
from tests.helpers.launching import plan, read


def test_the_heartbeat_is_on_by_default_and_follows_the_timeout_of_collective_calls() -> None:
    """Decision 16."""
    config = read("--nproc_per_node=2")
    assert (config.heartbeat_timeout_s, config.heartbeat_is_default) == (1800.0, True)
    assert all(FILE_VARIABLE in spec.environment for spec in plan(config))
    assert read(env={"PADDLE_PG_TIMEOUT": "7200000"}).heartbeat_timeout_s == 7200
    assert read(env={"PADDLE_PG_TIMEOUT": "5000"}).heartbeat_timeout_s == 1800
    asked = read("--heartbeat_timeout=60", env={"PADDLE_PG_TIMEOUT": "7200000"})
    assert (asked.heartbeat_timeout_s, asked.heartbeat_is_default) == (60.0, False)


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
        assert all(Path(file).parent == config.scratch_path for file in files)
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
