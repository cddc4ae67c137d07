"""Kill -9 in the middle of an interval, and resume: the same parameters as the run that was not interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from tests.helpers.resumable_training import OPTIONS

SCRIPT = Path(__file__).parent.parent / "helpers" / "resumable_training.py"
STEPS = 8
KILL_AFTER = 4  # inside a window of 3 steps, an interval of 4 that began after step 1, and a rampup of 6


def launch(name: str, states: Path, kill_after: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs the job on two workers."""
    states.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", f"--log_dir={states}/log", *flags]
    return subprocess.run(
        [*command, str(SCRIPT), name, str(states), str(STEPS), str(kill_after)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=states,
    )


def final(states: Path) -> list[Any]:
    """Returns the last state of both workers."""
    return [fleet.load(str(states / f"{rank}-{STEPS}.state")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_resumes_to_the_same_parameters(name: str, tmp_path: Path) -> None:
    """Issue 3, proof 4; 003-37: exit code of the kill, then a second launch that ends where the straight run does."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert launch(name, straight, -1).returncode == 0
    assert launch(name, killed, KILL_AFTER).returncode == 128 + 9
    assert not (killed / f"1-{STEPS}.state").exists()
    assert launch(name, killed, -1).returncode == 0
    torch.testing.assert_close(final(killed), final(straight), atol=0, rtol=0)
