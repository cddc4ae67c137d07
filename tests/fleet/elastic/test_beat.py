"""The heartbeat as the worker writes it: cheap, exact, and of its own work only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fleet
from fleet.elastic.health import Beat
from fleet.env import Environment
from fleet.errors import NotInitializedError, UnsupportedOptionError
from fleet.launch.processes.worker_file import (
    OWN_NS,
    OWN_STEPS,
    PAUSED,
    PID,
    SHOWS_STACKS,
    STEP,
    STOP_ASKED,
    TAKES_TIMES,
    WorkerFile,
)
from fleet.training.fleet_model import FleetModel
from tests.helpers.fleets import own_fleet


@pytest.fixture
def file(tmp_path: Path) -> Iterator[WorkerFile]:
    """The launcher's side."""
    file = WorkerFile.create(tmp_path / "worker.0")
    file.words[TAKES_TIMES] = 1
    yield file
    file.close()


def test_there_is_no_heartbeat_without_a_launcher(tmp_path: Path) -> None:
    assert Beat.start(Environment({})) is None
    assert Beat.start(Environment({"FLEET_WORKER_FILE": str(tmp_path / "gone")})) is None


def test_steps_pauses_and_the_end(file: WorkerFile) -> None:
    beat = Beat.start(Environment({"FLEET_WORKER_FILE": str(file.path)}))
    assert beat is not None
    assert file.words[PID]
    beat.after_step(4)
    assert file.words[STEP] == 4
    beat.beat(pause=True)
    assert file.words[PAUSED]
    beat.after_step(5)
    assert not file.words[PAUSED]
    assert not beat.stop_is_asked
    file.words[STOP_ASKED] = 1
    assert beat.stop_is_asked
    beat.close()
    assert (file.words[PAUSED], file.words[SHOWS_STACKS]) == (1, 0)


def test_own_work_ends_with_the_last_gradient(file: WorkerFile) -> None:
    """What comes between the backward pass and the end of the step is waiting, not work."""
    beat = Beat(WorkerFile(file.path))
    model = torch.nn.Linear(2, 1)
    beat.model_wrapped(FleetModel(model, model))
    beat.after_step(1)
    time.sleep(0.05)
    model(torch.ones(1, 2)).sum().backward()
    time.sleep(0.2)
    beat.after_step(2)
    beat.after_step(3)  # a step without a backward pass says nothing of work
    assert file.words[OWN_STEPS] == 1
    assert 0.05e9 <= file.words[OWN_NS] < 0.2e9
    beat.close()


def test_a_step_costs_less_than_5_microseconds(file: WorkerFile) -> None:
    beat, best_s = Beat(WorkerFile(file.path)), 1.0
    for _ in range(50):
        began = time.perf_counter()
        for step in range(1000):
            beat.after_step(step)
        best_s = min(best_s, (time.perf_counter() - began) / 1000)
    beat.close()
    assert best_s < 5e-6


def test_the_optimizer_beats(file: WorkerFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)
    monkeypatch.setenv("FLEET_WORKER_FILE", str(file.path))
    fleet.init(is_collective=True, log_level="ERROR")
    net = torch.nn.Linear(2, 1)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert file.words[STEP] == 3
    assert file.words[OWN_STEPS] == 3
    checkpoint = fleet.elastic.Checkpoint(tmp_path / "checkpoints", model, optimizer)
    paused = []
    monkeypatch.setattr(checkpoint, "_agree", lambda error: paused.append(file.words[PAUSED]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save()
    monkeypatch.undo()
    assert paused == [1]  # a long write is no hang
    checkpoint.save()
    assert not file.words[PAUSED]
    checkpoint.close()
    checkpoint._session.close()
    assert file.words[PAUSED]


def test_a_refused_strategy_leaves_the_job_as_it_is(file: WorkerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refused call had closed the job, and the corrected one closed it again: on released memory."""
    own = own_fleet(monkeypatch)
    monkeypatch.setenv("FLEET_WORKER_FILE", str(file.path))
    own.init(is_collective=True, log_level="ERROR")
    session = own.session
    net = torch.nn.Linear(2, 1)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = own.distributed_model(net)
    strategy = fleet.DistributedStrategy()
    strategy.auto_search = True
    with pytest.raises(UnsupportedOptionError, match="auto_search"):
        own.init(is_collective=True, strategy=strategy, log_level="ERROR")
    assert own.session is session
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert file.words[STEP] == 1
    assert not file.words[PAUSED]
    strategy.auto_search = False
    own.init(is_collective=True, strategy=strategy, log_level="ERROR")
    assert own.session is not session
    own._close()


def test_a_start_that_fails_later_ends_the_former_job_once(file: WorkerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only a rendezvous tells comes after the former job has ended."""
    own = own_fleet(monkeypatch)
    monkeypatch.setenv("FLEET_WORKER_FILE", str(file.path))
    own.init(is_collective=True, log_level="ERROR")
    with monkeypatch.context() as failing:
        failing.setattr("fleet.job.start._start_group", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own.init(is_collective=True, log_level="ERROR")
    with pytest.raises(NotInitializedError):
        own.worker_index()
    own.init(is_collective=True, log_level="ERROR")
    assert own.worker_index() == 0
    own._close()
