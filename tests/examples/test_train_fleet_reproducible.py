"""The reproducible script of the example: the same lines on any number of workers, and after a restart with others."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLE, TINY, command, history, run, train

SCRIPT = "train_fleet_reproducible.py"
OPTIONS = (*TINY, "--batch-size", "8", "--epochs", "1", "--save-every", "5")


def on_workers(number: int, *arguments: str) -> list[str]:
    """Returns the command that runs the script on so many workers."""
    launcher = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={number}", "--log_dir", "log"]
    return [*launcher, str(EXAMPLE / SCRIPT), *arguments]


def digest(output: str) -> str:
    """Returns the digest of all bits that the script prints."""
    (found,) = set(re.findall(r"Weights and optimizer state: (\w{64})$", output, re.MULTILINE))
    return str(found)


@pytest.mark.slow
def test_losses_and_weights_are_equal_on_one_and_on_three_workers(tmp_path: Path) -> None:
    one = train(command(SCRIPT, *OPTIONS, "--checkpoint", "c1", "--history", "one"), tmp_path, 120)
    three = train(on_workers(3, *OPTIONS, "--checkpoint", "c3", "--history", "three"), tmp_path, 120)
    losses, others = (
        [(record["update"], record["loss"]) for record in history(tmp_path / name)] for name in ("one", "three")
    )
    assert losses == others
    assert [update for update, _ in losses] == list(range(1, 23))
    assert losses[-1][1] < losses[0][1]
    assert digest(one) == digest(three)
    assert "[Update 22/22] loss: " in one


@pytest.mark.slow
def test_a_restart_with_another_number_of_workers_goes_on(tmp_path: Path) -> None:
    whole = train(command(SCRIPT, *OPTIONS, "--checkpoint", "whole", "--history", "whole.jsonl"), tmp_path, 120)
    # As a job that was killed after the checkpoint of update 10 leaves it.
    train(command(SCRIPT, *OPTIONS, "--checkpoint", "broken", "--history", "h"), tmp_path, 120)
    for newer in sorted((tmp_path / "broken").iterdir())[1:]:
        shutil.rmtree(newer)
    assert [path.name for path in (tmp_path / "broken").iterdir()] == ["step-0000000015"]
    (tmp_path / "h").unlink()
    rest = train(on_workers(2, *OPTIONS, "--checkpoint", "broken", "--history", "h"), tmp_path, 120)
    assert digest(rest) == digest(whole)
    assert [record["update"] for record in history(tmp_path / "h")] == list(range(16, 23))
    assert [record["loss"] for record in history(tmp_path / "h")] == [
        record["loss"] for record in history(tmp_path / "whole.jsonl")[15:]
    ]


def test_an_option_that_would_not_act_is_refused(tmp_path: Path) -> None:
    code, output = run(command(SCRIPT, *TINY, "--max-batches", "2"), tmp_path)
    assert code == 2
    assert "lower --epochs" in output
