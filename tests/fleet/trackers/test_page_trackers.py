"""What a worker writes for the page of the job, as the launcher reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fleet
from fleet.errors import ConfigError
from fleet.launch.page.page_folder import PageFolder, ProgressRecord
from fleet.trackers import page_trackers, progress
from fleet.trackers.page_trackers import CurvePage, RankPage
from fleet.trackers.progress import Progress
from fleet.trackers.tracker import RunInfo

RUN = RunInfo(name="run", project="project", folder=Path("nowhere"), rank=3)


def test_a_rank_keeps_its_newest_values(tmp_path: Path) -> None:
    rank = RankPage(tmp_path, Progress(lambda: 0))
    rank.start(RUN)
    rank.log({"loss": 1.0, "lr": 0.5}, 1)
    rank.log({"loss": 0.5}, 2)  # too soon to be written
    folder = PageFolder(tmp_path)
    assert folder.worker(3).values == {"loss": 1.0, "lr": 0.5}
    rank.checkpoints = tmp_path
    rank.close()
    found = PageFolder(tmp_path).worker(3)
    assert (found.step, found.values, found.checkpoints) == (2, {"loss": 0.5, "lr": 0.5}, tmp_path)


def test_curves_of_a_long_run_stay_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(page_trackers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    curves = CurvePage(tmp_path)
    steps = 20_000
    for step in range(steps):
        clock.now = step * 0.5
        curves.log({"loss": 1.0 / (step + 1)}, step)
    lines = (tmp_path / "curves.jsonl").read_text().splitlines()
    assert 500 < len(lines) < 5000
    found = [json.loads(line)["step"] for line in lines]
    assert found[:500] == list(range(500)), "at first each step"
    assert steps - found[-1] <= steps / 500 + 1
    assert max(b - a for a, b in zip(found, found[1:], strict=False)) <= steps / 500 + 1


def test_a_rank_says_how_long_the_rest_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 1e9 + clock.now)
    for module in (page_trackers, progress):
        monkeypatch.setattr(module, "time", times)
    made = Progress(lambda: 0)
    made.total_steps = 100
    rank = RankPage(tmp_path, made)
    rank.start(RUN)
    rank.log({"loss": 1.0}, 10)
    rank.close()
    assert PageFolder(tmp_path).worker(3).progress == ProgressRecord(10, 100, 1e9)
    clock.now = 40.0
    rank.log({"loss": 1.0}, 30)
    assert PageFolder(tmp_path).worker(3).progress == ProgressRecord(30, 100, 1e9 + 40, left_s=140.0)


def test_the_length_of_a_run_comes_with_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: None
) -> None:
    monkeypatch.setenv("FLEET_PAGE_FOLDER", str(tmp_path))
    fleet.fleet.init(is_collective=True)
    fleet.fleet.log({"loss": 1.0}, 3, total_steps=12)
    found = PageFolder(tmp_path).worker(0).progress
    assert found is not None
    assert (found.step, found.total_steps) == (3, 12)
    with pytest.raises(ConfigError, match=r"fleet\.log\(total_steps=-1\) takes a number of steps, at least 0"):
        fleet.fleet.log({"loss": 1.0}, total_steps=-1)


@pytest.fixture
def closed() -> Iterator[None]:
    """Ends what a test has begun."""
    yield
    fleet.fleet._instance()._close()


def test_a_script_that_logs_nothing_shows_its_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: None
) -> None:
    monkeypatch.setenv("FLEET_PAGE_FOLDER", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fleet.fleet.init(is_collective=True)
    model = torch.nn.Linear(2, 1)
    optimizer = fleet.fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model = fleet.fleet.distributed_model(model)
    for _ in range(10):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    folder = PageFolder(tmp_path)
    assert {"time/step_ms", "rate/steps_per_s", "memory/host_mib"} <= set(folder.worker(0).values)
    assert folder.curves()["rate/steps_per_s"][0][0] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.jsonl", "worker.0.json"]


def test_a_folder_that_is_gone_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: None) -> None:
    monkeypatch.setenv("FLEET_PAGE_FOLDER", str(tmp_path / "gone"))
    fleet.fleet.init(is_collective=True)
    assert fleet.fleet.log({"loss": 1.0}) == {"loss": 1.0}
    assert fleet.fleet.log({"loss": 2.0}) == {"loss": 2.0}
