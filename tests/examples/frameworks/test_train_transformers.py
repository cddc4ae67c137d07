"""The example for Hugging Face's Trainer: two workers give the losses of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.scripts import ROOT, environment

SCRIPT = ROOT / "examples" / "frameworks" / "train_transformers.py"


def train(folder: Path, launcher: list[str], *arguments: str) -> list[float]:
    """Returns the losses that the script prints on worker 0."""
    line = [sys.executable, *launcher, str(SCRIPT), "--output", "out", *arguments]
    folder.mkdir(exist_ok=True)
    found = subprocess.run(
        line, cwd=folder, env={**environment(), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", found.stdout)]


@pytest.mark.slow
def test_two_workers_train_as_one_process(tmp_path: Path) -> None:
    launcher = ["-m", "fleet.launch", "--nproc_per_node=2", "--log_dir", "log"]
    sharded = ["--strategy", str(ROOT / "examples" / "resnet" / "configs" / "sharding.yaml")]
    one = train(tmp_path / "one", [], "--batch-size", "64", "--epochs", "0.5")
    two = train(tmp_path / "two", launcher, "--batch-size", "32", "--epochs", "0.5", *sharded)
    assert len(one) > 0
    assert one == pytest.approx(two, abs=1e-3)
    alone, shared = (load_file(tmp_path / name / "out" / "model.safetensors") for name in ("one", "two"))
    assert alone.keys() == shared.keys()
    assert max(float((alone[name] - shared[name]).abs().max()) for name in alone) < 1e-3


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 60
