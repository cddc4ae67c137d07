"""deploy/skypilot/train.yaml: what it runs on each node, with SkyPilot's variables and two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.sources import ROOT
from tests.helpers.workers import free_ports

TASK = yaml.safe_load((ROOT / "deploy" / "skypilot" / "train.yaml").read_text(encoding="utf-8"))
SCRIPT = "examples/resnet/train_fleet_dygraph.py"
TRAIN = """
from fleet import fleet

fleet.init(is_collective=True)
print("workers", fleet.worker_num(), "sum", fleet.util.all_reduce(fleet.worker_index() + 1))
"""


def test_the_task_names_what_exists() -> None:
    assert TASK["num_nodes"] == 2
    assert TASK["envs"] == {"FLEET_JOB_SECRET": None}
    assert (ROOT / SCRIPT).exists()
    assert TASK["run"].rstrip().endswith(SCRIPT)


@pytest.mark.slow
def test_the_nodes_form_one_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (port,) = free_ports(1)
    text = TASK["run"].replace(SCRIPT, "train.py").replace("20777", str(port)).replace("python ", f"{sys.executable} ")
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLEET_"))}
    nodes = []
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / "train.py").write_text(TRAIN)
        environment = {
            **known,
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "FLEET_JOB_SECRET": "0" * 64,
            "POD_IP": "127.0.0.1",
        }
        nodes.append(
            subprocess.Popen(
                ["bash", "-euc", text],
                cwd=tmp_path / f"node{rank}",
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [node.communicate(timeout=180)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "workers 2 sum 3" in said[0]
