"""A program that ends while it still holds its model ends with its own exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
import fleet
fleet.init(is_collective=True, log_level="ERROR")
net = torch.nn.Linear(64, 64)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
for _ in range(5):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(5)
"""


@pytest.mark.slow
def test_exit_code_is_the_programs_own(tmp_path: Path) -> None:
    """Decision 10: every launch ends with the script's code; gloo's threads have let go in time."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", f"--log_dir={tmp_path}/log", str(script)]
    codes = [subprocess.run(command, capture_output=True, timeout=60).returncode for _ in range(6)]
    assert codes == [5] * 6
