"""fleet.log with trackers: what is written where, what is logged by itself, and restarts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_session
from fleet.profile.step_watch import StepWatch
from fleet.trackers import RunInfo, Tracker, run_log
from tests.helpers.workers import run_workers


class Kept(Tracker):
    """Keeps what it is given."""

    every_rank = False

    def __init__(self) -> None:
        self.run: RunInfo | None = None
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def start(self, run: RunInfo) -> None:
        """Keeps the run."""
        assert self.run is None
        self.run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keeps the values."""
        if "fail" in values:
            raise OSError("disk full")
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        """Counts."""
        self.closed += 1


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Stands for the tracker named json."""
    made = Kept()
    monkeypatch.setattr(run_log, "make_tracker", lambda name, origin: made)
    yield made
    fleet.fleet._instance()._close()


def start(place: Path, trackers: list[str], strategy: fleet.DistributedStrategy | None = None, **config: Any) -> Any:
    """Returns the session of a single process."""
    strategy = strategy or fleet.DistributedStrategy()
    strategy.trackers = trackers
    strategy.tracker_configs = {"folder": str(place)} | config
    fleet.init(is_collective=True, strategy=strategy)
    return running_session()


def train(steps: int, log: bool = True) -> None:
    """Trains a small model, as the tutorial does."""
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if log:
            fleet.log({"loss": loss})


def test_samples_of_all_logical_workers_count(tmp_path: Path, kept: Kept) -> None:
    """A step is an update; a process that hosts 2 of 8 on 3 stands for four times its rows."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 2}
    start(tmp_path, ["json"], strategy, every=2)
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        for _ in fleet.elastic.logical_ranks():
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step for step, _ in kept.seen] == [2, 4]
    values = kept.seen[1][1]
    assert values["rate/samples_per_s"] == pytest.approx(2 * 8 * values["rate/steps_per_s"])
    job: Any = SimpleNamespace(logical=LogicalWorkers(8, 3, 2), data_replicas=3)
    assert run_log._batches_of_all(job) == 4


def test_log_needs_init() -> None:
    fleet.fleet._instance()._close()  # of the tests before
    with pytest.raises(NotInitializedError, match=r"fleet\.log needs fleet\.init"):
        fleet.log({"x": 1})


def test_values_go_to_the_tracker(tmp_path: Path, kept: Kept) -> None:
    start(tmp_path / "new" / "runs", ["json"], run_name="mine", project="shop")
    train(3)
    assert fleet.log({"epoch": 1}, step=1) == {"epoch": 1.0}
    assert [step for step, _ in kept.seen] == [1, 2, 3, 1]
    assert kept.run is not None
    assert (kept.run.name, kept.run.project, kept.run.resumed, kept.run.first_step) == ("mine", "shop", False, None)
    assert kept.run.options["trackers"] == ["json"]
    fleet.fleet._instance()._close()
    assert kept.closed == 1


def test_values_that_are_logged_by_themselves(tmp_path: Path, kept: Kept) -> None:
    start(tmp_path, ["json"], every=4, peak_tflops=1e-6)
    train(9, log=False)
    assert [step for step, _ in kept.seen] == [4, 8]
    values = kept.seen[1][1]
    parts = [values[f"time/{part}_ms"] for part in ("data", "forward", "backward", "exchange", "update", "other")]
    assert sum(parts) == pytest.approx(values["time/step_ms"])
    assert values["rate/steps_per_s"] == pytest.approx(1e3 / values["time/step_ms"])
    assert values["rate/samples_per_s"] == pytest.approx(8 * values["rate/steps_per_s"])
    # A linear layer of 4 inputs and one output: 8 operations a row, three times, 8 rows.
    assert values["rate/mfu"] * 1e6 == pytest.approx(3 * 8 * 8 * values["rate/steps_per_s"])
    assert values["memory/host_mib"] > 50
    assert "rate/mfu" not in kept.seen[0][1]  # the first forward was not counted


@pytest.mark.parametrize("trackers", [[], ["json"]])
def test_nothing_is_measured_unless_asked(tmp_path: Path, kept: Kept, trackers: list[str]) -> None:
    session = start(tmp_path, trackers, automatic=False)
    train(3, log=False)
    assert session.job.listeners.get(StepWatch).times is None
    assert kept.seen == []


def test_settings_without_a_tracker_are_told(tmp_path: Path, kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "FLEET"):
        start(tmp_path, [])
    assert "tracker_configs was set and changes nothing" in caplog.text


def test_a_tracker_that_fails_is_dropped_once(tmp_path: Path, kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, ["json"], automatic=False)
    with caplog.at_level(logging.WARNING, "FLEET"):
        for _ in range(3):
            assert fleet.log({"fail": 1.0}) == {"fail": 1.0}
    assert caplog.text.count("OSError: disk full") == 1
    assert kept.seen == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"run_name": "a/b"}, r"tracker_configs\['run_name'\] is 'a/b'"),
        ({"folder": "/dev/null/x"}, r"tracker_configs\['folder'\] is '/dev/null/x'"),
        ({"every": 0}, "every.*at least 1"),
        ({"folders": "x"}, "has no key 'folders'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        start(tmp_path, ["json"], **config)


@pytest.mark.parametrize("step", [-1, 1.5, "3", True])
def test_wrong_steps_are_refused(tmp_path: Path, kept: Kept, step: Any) -> None:
    start(tmp_path, ["json"])
    with pytest.raises(ConfigError, match=r"fleet\.log\(step="):
        fleet.log({"x": 1}, step=step)


def test_a_strategy_of_distributed_optimizer_brings_its_trackers(tmp_path: Path, kept: Kept) -> None:
    fleet.init(is_collective=True)
    strategy = fleet.DistributedStrategy()
    strategy.trackers = ["json"]
    strategy.tracker_configs = {"folder": str(tmp_path), "every": 1}
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert [step for step, _ in kept.seen] == [1, 2]
    assert kept.seen[1][1]["time/backward_ms"] > 0


def test_trackers_of_a_run_that_has_begun_stay(tmp_path: Path, kept: Kept) -> None:
    start(tmp_path, ["json"], automatic=False)
    fleet.log({"x": 1})
    strategy = fleet.DistributedStrategy()
    strategy.trackers = ["csv"]
    model = torch.nn.Linear(2, 1)
    with (
        pytest.raises(ConfigError, match="values have been logged already"),
        pytest.warns(OptionWarning, match="replaces the strategy"),
    ):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)


class Everywhere(Kept):
    """One on every worker."""

    every_rank = True


def _everywhere(rank: int, world_size: int, folder: str) -> tuple[list[Any], list[str]]:
    made: list[Everywhere] = []

    def make(name: str, origin: str) -> Tracker:
        made.append(Everywhere())
        return made[-1]

    run_log.is_own = lambda name: False  # type: ignore[assignment]  # a class of another package may be on every worker
    run_log.make_tracker = make  # type: ignore[assignment]
    run_log.check_trackers = lambda asked: None  # type: ignore[assignment]
    start(Path(folder), ["json"], automatic=False)
    mean = fleet.log({"rank": rank})
    return [mean, made[0].seen], sorted(path.name for path in Path(folder).iterdir())


def test_a_tracker_on_every_worker_gets_its_own_values(tmp_path: Path) -> None:
    for rank, (found, _) in enumerate(run_workers(_everywhere, 2, str(tmp_path), backend=None)):
        assert found == [{"rank": 0.5}, [(0, {"rank": float(rank)})]]


def _resume(rank: int, world_size: int, folder: str, stop: int) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.trackers = ["json", "csv"]
    strategy.tracker_configs = {"folder": f"{folder}/runs", "every": 2}
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with fleet.elastic.Checkpoint(f"{folder}/checkpoints", model, optimizer) as checkpoint:
        checkpoint.resume()
        while checkpoint.step < stop:
            loss = model(torch.ones(8, 4) * (rank + 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            fleet.log({"loss": loss})
            if checkpoint.step == 4:
                checkpoint.save(wait=True)


def test_a_restart_goes_on_with_the_run(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    run_workers(_resume, 2, str(whole), 9, backend=None)
    for stop in (6, 9):  # the second begins behind step 4
        run_workers(_resume, 2, str(parts), stop, backend=None, environment={"FLEET_POD": "launch"})

    def losses(folder: Path) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in (folder / "runs" / "default.jsonl").read_text().splitlines()]
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    assert losses(parts) == losses(whole)
    assert [step for step, _ in losses(parts)] == list(range(1, 10))
    assert sorted(path.name for path in (parts / "runs").iterdir()) == [".default.run", "default.csv", "default.jsonl"]
