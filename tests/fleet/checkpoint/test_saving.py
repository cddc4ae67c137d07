"""save: what it refuses, what a failed one leaves, and that it does not wait where asked not to."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet import checkpoint, fleet
from fleet.errors import CheckpointError, ConfigError
from tests.helpers.ready_python import run_python
from tests.helpers.workers import WorkerError, run_workers


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_second_save_replaces_the_first(tmp_path: Path, asynchronous: bool) -> None:
    model = nn.Linear(3, 3)
    for epoch in range(3):
        with torch.no_grad():
            model.weight.fill_(epoch)
        checkpoint.save(tmp_path, {"model": model, "epoch": epoch}, asynchronous=asynchronous)
        with torch.no_grad():
            model.weight.fill_(-1)  # what is written is the state at the call
        checkpoint.wait()
        found = checkpoint.load(tmp_path)
        assert found["epoch"] == epoch
        assert bool((found["model"]["weight"] == epoch).all())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"], "old files are gone"


@pytest.mark.parametrize(
    ("path", "asynchronous", "said"),
    [("", False, "path=''"), (None, False, "path=None"), (3, False, "path=3"), ("x", 1, "asynchronous=1")],
)
def test_wrong_arguments_are_named(path: Any, asynchronous: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpoint.save(path, {"epoch": 1}, asynchronous=asynchronous)


def test_a_path_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"file'\): is a file"):
        checkpoint.save(tmp_path / "file", {"epoch": 1})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds \['notes.txt'\] and no checkpoint"):
        checkpoint.save(tmp_path / "folder", {"epoch": 1})
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["notes.txt"]


def test_leftovers_of_a_dead_save_go_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "data-abc-00000.safetensors").write_bytes(b"half")
    (tmp_path / "record-abc-00001.json").write_text("{}")
    with pytest.raises(CheckpointError, match="parts of a save that did not finish"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, {"epoch": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


def test_a_save_while_training_goes_on_is_seen_at_the_end_of_the_program(tmp_path: Path) -> None:
    script = f"""
import torch
from fleet import checkpoint
checkpoint.save({str(tmp_path / "a")!r}, {{"model": torch.nn.Linear(500, 500), "epoch": 4}}, asynchronous=True)
"""
    run_python(script).check_returncode()
    assert checkpoint.load(tmp_path / "a", {"epoch": 0}) == {"epoch": 4}


def test_a_failed_save_at_exit_is_the_exit_status(tmp_path: Path) -> None:
    script = f"""
import os, shutil, torch
from fleet import checkpoint
from fleet.checkpoint.writer import own_writer
checkpoint.save({str(tmp_path / "a")!r}, {{"epoch": 1}}, asynchronous=True)
checkpoint.wait()
os.kill(own_writer()._process.pid, 19)
checkpoint.save({str(tmp_path / "a")!r}, {{"epoch": 2}}, asynchronous=True)
os.kill(own_writer()._process.pid, 9)
"""
    done = run_python(script)
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr
    assert "was killed by signal 9" in done.stderr
    assert checkpoint.load(tmp_path / "a", {"epoch": 0}) == {"epoch": 1}, "the one before is whole"


def test_an_index_can_be_read_by_anyone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)})
    content = json.loads((tmp_path / "index.json").read_text())
    assert content["format"] == "fleet-checkpoint"
    assert content["tensors"]["model/weight"]["shape"] == [2, 2]
    safetensors = pytest.importorskip("safetensors.torch")
    (file,) = tmp_path.glob("data-*.safetensors")
    assert set(safetensors.load_file(file)) == {"model/weight", "model/bias"}


def at_different_steps(rank: int, world_size: int, path: str) -> None:
    """Saves after another number of steps on each worker."""
    fleet.init(is_collective=True)
    model = nn.Linear(2, 2)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(rank):
        optimizer.step()
    fleet.checkpoint.save(path, {"epoch": 1})


def other_keys(rank: int, world_size: int, path: str) -> None:
    """Saves other objects on each worker."""
    fleet.init(is_collective=True)
    fleet.checkpoint.save(path, {"epoch": 1} if rank else {"step": 1})


def wrong_on_one(rank: int, world_size: int, path: str) -> None:
    """Saves what cannot be saved, on worker 1."""
    fleet.init(is_collective=True)
    fleet.checkpoint.save(path, {"epoch": object() if rank else 1})


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (at_different_steps, r"step by rank is \[0, 1\]"),
        (other_keys, r"the workers name different objects: \[\['step'\], \['epoch'\]\]"),
        (wrong_on_one, "worker 1: checkpoint: 'epoch' is a builtins.object"),
    ],
)
def test_workers_that_disagree_are_told_on_every_worker(tmp_path: Path, job: Any, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        run_workers(job, 2, f"{tmp_path / 'new'}", backend=None)
    assert not (tmp_path / "new" / "index.json").exists()


def test_an_asynchronous_save_returns_before_it_is_on_disk(tmp_path: Path) -> None:
    model = nn.Linear(3000, 3000, bias=False)
    checkpoint.save(tmp_path, {"model": model}, asynchronous=True)  # makes the buffer
    checkpoint.wait()
    began = time.perf_counter()
    checkpoint.save(tmp_path, {"model": model}, asynchronous=True)
    returned = time.perf_counter() - began
    checkpoint.wait()
    assert returned < time.perf_counter() - began
