"""A program that ends while it still holds its model ends with its own exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet.facade import Fleet
from tests.helpers.workers import run_workers

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


THREADS = """
import atexit, json, os, sys
def show():
    tasks = os.listdir("/proc/self/task")
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
    print("left:", sorted(name for name in names if "gloo" in name or "store" in name), flush=True)
atexit.register(show)  # called after what fleet.init registers
import torch, fleet
strategy = fleet.DistributedStrategy()
strategy.update(json.loads(sys.argv[1]))
fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
model = fleet.distributed_model(net)
for _ in range(3):
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the threads of a process from /proc")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fp16_allreduce": True},
        {"localsgd": True},
        {"dgc": True},
        {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
    ],
    ids=lambda options: "-".join(options) or "data_parallel",
)
def test_no_thread_of_the_group_is_left_when_python_ends(options: dict[str, Any], tmp_path: Path) -> None:
    """One that runs a hook of the exchange and lets go of a Python object while Python ends aborts a finished job.

    Sharded models are not among the cases: their parameters hold the group, whose threads run no Python there.
    """
    script = tmp_path / "train.py"
    script.write_text(THREADS)
    command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", f"--log_dir={tmp_path}/log", str(script)]
    done = subprocess.run([*command, json.dumps(options)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"log/workerlog.{rank}").read_text().splitlines()[-1] == "left: []"


def _reducers_when_the_group_goes(rank: int, world_size: int) -> list[int]:
    """Returns, for each destroyed group, how many models with a reducer were left."""
    import weakref

    import torch
    import torch.distributed as dist

    own = Fleet()
    own.init(is_collective=True, log_level="ERROR")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    model.itself = [model]
    held = weakref.ref(model)
    del model
    left = []
    destroy = dist.destroy_process_group

    def counted(*args: Any, **settings: Any) -> None:
        left.append(int(held() is not None))
        destroy(*args, **settings)

    dist.destroy_process_group = counted
    try:
        own._close()
    finally:
        dist.destroy_process_group = destroy
    return left


def test_reducers_go_before_the_group_they_hold() -> None:
    """A reducer that destroys the group holds the GIL, for which gloo's thread may wait with the group's lock."""
    assert run_workers(_reducers_when_the_group_goes, 2, backend=None) == [[0], [0]]
