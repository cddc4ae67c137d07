"""The scripts of examples/frameworks for Lightning: two workers print what one process prints."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.scripts import ROOT, train

pytestmark = pytest.mark.slow
FOLDER = ROOT / "examples" / "frameworks"
SHARDING = str(ROOT / "examples" / "resnet" / "configs" / "sharding.yaml")
LAUNCHER = (sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", "--log_dir", "log")


def numbers(output: str) -> list[float]:
    """Returns the losses and accuracies that a script has printed."""
    return [float(text) for line in re.findall(r".*test acc.*", output) for text in re.findall(r"\d+\.\d{5}", line)]


@pytest.mark.parametrize("script", ["train_fabric.py", "train_lightning.py"])
def test_two_workers_print_what_one_process_prints(script: str, tmp_path: Path) -> None:
    lines = (FOLDER / script).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    command, found = (str(FOLDER / script), "--epochs", "2"), []
    for start, more in (((sys.executable,), ()), (LAUNCHER, ("--strategy", SHARDING))):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        found.append(numbers(train([*start, *command, *more], folder, limit_s=180)))
    assert len(found[0]) >= 2
    assert found[1] == pytest.approx(found[0], abs=2e-5)


def test_checkpoints_are_those_of_the_plain_network(tmp_path: Path) -> None:
    saved = tmp_path / "digits.pt"
    script = (str(FOLDER / "train_fabric.py"), "--epochs", "1", "--checkpoint", str(saved), "--strategy", SHARDING)
    train([*LAUNCHER, *script], tmp_path, limit_s=180)
    state = torch.load(saved, weights_only=True)
    torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).load_state_dict(
        state["model"]
    )
    assert state["epoch"] == 1
    assert sorted(state["optimizer"]["state"]) == [0, 1, 2, 3]
