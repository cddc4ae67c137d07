"""One worker of the strategy benchmark: plain data parallel and one other job, in turn, block by block.

The other job is a strategy file, or the same mechanism written by hand in torch. Rank 0 writes, for both: seconds per
step of each block, bytes this worker sent per step (read from its sockets), and the loss after the run. ``alone``
writes the job's peak of memory instead: the most that torch's allocator had handed out.
Arguments: name of the job (alone also ``plain_sgd``, ``plain_adam``), ``turns`` or ``alone``, result file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fleet

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "resnet"))
from _peak import measured_bytes  # noqa: E402
from _process import sent_bytes  # noqa: E402
from _strategy_jobs import BY_HAND, JOBS, WIDTHS, fresh  # noqa: E402

Step = Callable[[torch.Tensor, torch.Tensor], float]
BLOCKS, STEPS, BATCH_SIZE = 8, 5, 32


def with_fleet(options: dict[str, Any], adam: bool, width: int = 32) -> Step:
    """Returns one step of the plain loop under fleet."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    net, inner = fresh(adam, width)
    optimizer = fleet.distributed_optimizer(inner)
    model = fleet.distributed_model(net)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this worker's half of the handwritten digits, 32x32, three channels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    x = nn.functional.interpolate(x, 32, mode="bilinear").expand(-1, 3, -1, -1)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return x[mine], torch.tensor(labels)[mine]


def in_turns(name: str) -> dict[str, Any]:
    """Returns times, bytes sent and loss of plain data parallel, the job, and the job by hand, block by block."""
    options, adam = JOBS[name]
    width = WIDTHS.get(name, 32)
    jobs = {"plain": with_fleet({}, adam, width), "job": with_fleet(options, adam, width)}
    if name in BY_HAND:
        jobs["by hand"] = BY_HAND[name](adam)
    x, y = digits()
    found: dict[str, Any] = {key: {"times": [], "sent": [], "loss": 0.0} for key in jobs}
    for block in range(BLOCKS + 1):
        for key in jobs if block % 2 else reversed(jobs):
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            for step in range(STEPS):
                loss = jobs[key](*batch_of(x, y, block * STEPS + step))
            dist.barrier()
            if block:  # the first block warms up
                found[key]["times"].append((time.perf_counter() - start) / STEPS)
                found[key]["sent"].append((sent_bytes() - before) / STEPS)
            found[key]["loss"] = loss
    return found


def batch_of(x: torch.Tensor, y: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the batch of one step."""
    at = step * BATCH_SIZE % (len(x) - BATCH_SIZE)
    return x[at : at + BATCH_SIZE], y[at : at + BATCH_SIZE]


def peak_bytes(name: str) -> int:
    """Returns the peak of memory of a job: its model, gradients, optimizer state, buffers and activations."""
    options, adam = ({}, name == "plain_adam") if name.startswith("plain") else JOBS[name]

    def train() -> None:
        step = with_fleet(options, adam, WIDTHS.get(name, 32))
        x, y = digits()
        for number in range(2 * STEPS):
            step(*batch_of(x, y, number))

    return measured_bytes(train)


def main() -> None:
    """Measures and writes the result."""
    name, how, target = sys.argv[1:4]
    found = {"peak_bytes": peak_bytes(name)} if how == "alone" else in_turns(name)
    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
