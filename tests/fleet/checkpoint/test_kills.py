"""kill -9 at any moment of a save: the checkpoint is the last one that was complete, or the one after it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleet
from fleet.checkpoint.commit import read_index
from fleet.checkpoint.storage import LocalFolder
from tests.fleet.checkpoint.killed_training import kill_again_and_again
from tests.helpers.workers import run_workers


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path, world_size: int, asynchronous: bool) -> None:
    run_workers(kill_again_and_again, 1, f"{tmp_path}", world_size, asynchronous, 3, world_size, backend=None)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_200_killed_saves_lose_and_tear_nothing(tmp_path: Path, world_size: int, asynchronous: bool) -> None:
    arguments = f"{tmp_path}", world_size, asynchronous, 50, 10 + world_size
    (steps,) = run_workers(kill_again_and_again, 1, *arguments, backend=None, timeout_s=900.0)
    print(steps)


def test_the_next_save_removes_what_killed_saves_have_left(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    fleet.checkpoint.save(path, {"step": 0})
    (path / "data-00ff-00000.safetensors").write_bytes(b"cut off")
    (path / ".record-00ff-00001.json.77.tmp").write_bytes(b"{")
    fleet.checkpoint.save(path, {"step": 1})
    assert {file.name for file in path.iterdir()} == {"index.json", *read_index(LocalFolder(path)).files}
