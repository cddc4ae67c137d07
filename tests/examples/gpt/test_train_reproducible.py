"""The reproducible script: the same losses on any number of processes, and those of plain torch but for rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.gpt.example import TINY, command
from tests.examples.gpt.test_train_hybrid import STEPS, run_script
from tests.examples.scripts import history, train
from tests.helpers.workers import run_workers


def run(rank: int, world_size: int, folder: str) -> None:
    """Trains on these workers."""
    run_script("train_fleet_reproducible", Path(folder), f"{world_size}")


def test_losses_are_equal_on_one_and_on_three_workers(tmp_path: Path) -> None:
    """Issue 44, acceptance 3."""
    train(command("train_torch.py", *TINY, *STEPS, "--history", "torch"), tmp_path)
    losses = {}
    for size in (1, 3):
        run_workers(run, size, str(tmp_path), backend=None)
        records = history(tmp_path / f"{size}")
        losses[size] = [record["loss"] for record in records]
        assert {record["workers"] for record in records} == {size}
    assert losses[1] == losses[3]
    expected = [record["loss"] for record in history(tmp_path / "torch")]
    assert losses[1] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
