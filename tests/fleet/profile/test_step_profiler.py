"""StepProfiler: what a worker profiles and writes, and a whole job under --profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.job.running import running_session
from tests.launch.launcher import Launcher

SCRIPT = """
import time
import torch
import fleet

fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(64, 64))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range({num_steps}):
    if fleet.rank() == 1:
        time.sleep(0.2)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Profiles steps 2 and 3 of this process; returns the folder."""
    monkeypatch.setenv("FLEET_PROFILE", "2:4")
    monkeypatch.setenv("PADDLE_LOG_DIR", str(tmp_path))
    return tmp_path / "profile"


def train(num_steps: int) -> None:
    """Trains a small model."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(nn.Linear(2, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what worker 0 has written: its steps and its trace."""
    steps, trace = (json.loads((folder / f"rank0.{name}.json").read_text()) for name in ("steps", "trace"))
    return steps, trace


def test_the_named_steps_are_profiled_and_no_others(profiled: Path) -> None:
    train(6)
    steps, trace = read(profiled)
    assert [step["step"] for step in steps["steps"]] == [2, 3]
    assert all(sum(step["parts_ns"].values()) == step["end_ns"] - step["begin_ns"] for step in steps["steps"])
    forwards = [event for event in trace["traceEvents"] if event["name"] == "aten::linear"]
    assert len(forwards) == 2
    begin_us = (steps["steps"][0]["begin_ns"] - trace["baseTimeNanoseconds"]) / 1000
    end_us = (steps["steps"][-1]["end_ns"] - trace["baseTimeNanoseconds"]) / 1000
    assert all(begin_us < event["ts"] < end_us for event in forwards)


def test_a_job_that_ends_inside_the_range_leaves_what_it_did(profiled: Path) -> None:
    train(3)
    session: Any = running_session()
    session.close()
    assert [step["step"] for step in read(profiled)[0]["steps"]] == [2]


def test_a_job_that_resumes_inside_the_range_starts_there(profiled: Path) -> None:
    fleet.init(is_collective=True)
    session: Any = running_session()
    session.job.num_steps = 3
    model = fleet.distributed_model(nn.Linear(2, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [step["step"] for step in read(profiled)[0]["steps"]] == [3]


def test_a_folder_that_cannot_be_written_costs_the_profile_alone(
    profiled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiled.write_text("a file")
    train(5)
    assert "cannot be written" in caplog.text


def test_a_range_that_is_none_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PROFILE", "4:2")
    with pytest.raises(ConfigError, match="FLEET_PROFILE is '4:2'"):
        fleet.init(is_collective=True)


@pytest.mark.slow
def test_a_job_shows_one_trace_a_table_and_the_slow_worker(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT.format(num_steps=6), "--nproc_per_node=2", "--profile=3:5") as job:
        assert job.process.wait(timeout=120) == 0, job.stderr
        assert "Where steps 3 to 4 went" in job.stderr
        assert "Straggler: rank 1 " in job.stderr
    table = (tmp_path / "log" / "profile" / "table.txt").read_text()
    assert table in job.stderr
    events = json.loads((tmp_path / "log" / "profile" / "trace.json").read_text())["traceEvents"]
    exchanges = {(event["pid"], event["name"]) for event in events if event["name"].startswith("fleet: ")}
    assert {(rank, "fleet: data_parallel bucket 0, 0.0159 MiB") for rank in (0, 1)} <= exchanges


@pytest.mark.slow
def test_a_job_that_is_too_short_says_so(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT.format(num_steps=1), "--nproc_per_node=2", "--profile=10:13") as job:
        assert job.process.wait(timeout=120) == 0, job.stderr
    assert "--profile 10:13: no worker of this node has finished one of these steps" in job.stderr


@pytest.mark.slow
def test_a_bad_range_starts_nothing(tmp_path: Path) -> None:
    with Launcher(tmp_path, SCRIPT, "--profile", "13:10") as job:
        assert job.process.wait(timeout=60) == 2
    assert "LAST is greater than FIRST" in job.stderr
    assert not (tmp_path / "log").exists()


PIPELINE = """
import torch
from torch import nn

import fleet
from fleet.meta_parallel import LayerDesc, PipelineLayer

strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"pp_degree": 2}
strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 4}
fleet.init(is_collective=True, strategy=strategy)
layers = PipelineLayer([LayerDesc(nn.Linear, 8, 8) for _ in range(2)], num_stages=2, loss_fn=nn.MSELoss())
model = fleet.distributed_model(layers)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model.train_batch((torch.ones(8, 8), torch.ones(8, 8)), optimizer)
"""


@pytest.mark.slow
def test_the_stages_of_a_pipeline_wait_for_each_other_in_the_exchange(tmp_path: Path) -> None:
    with Launcher(tmp_path, PIPELINE, "--nproc_per_node=2", "--profile=1:2") as job:
        assert job.process.wait(timeout=120) == 0, job.stderr
    events = json.loads((tmp_path / "log" / "profile" / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        parts = [event["name"] for event in events if event.get("cat") == "fleet" and event["pid"] == rank]
        assert (parts.count("forward"), parts.count("backward"), parts.count("update")) == (2, 2, 1)
        assert parts.count("exchange") >= 3
    names = {event["name"].split(",")[0] for event in events if event["name"].startswith("fleet: ")}
    assert names >= {"fleet: pipeline send to worker 1", "fleet: pipeline receive from worker 0"}
