"""Measures what fleet.mean costs a step, on two workers.

Run from the repository root::

    python benchmarks/mean.py              # half a minute
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fleet

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown  # noqa: E402

STEPS = 300
FORMS = ("one pass", "two means", "four passes under no_sync()")


def train(form: str, mean: Any) -> float:
    """Returns the processor time of the median step, in ms."""
    fleet.init(is_collective=True, log_level="ERROR")
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 1e-3))
    model = fleet.distributed_model(net)
    x, mask = torch.randn(16, 8), torch.rand(16) < 0.5
    times = []
    for _ in range(STEPS):
        begun = time.process_time()
        for at in range(4 if "four" in form else 1):
            model.require_backward_grad_sync = "four" not in form or at == 3
            loss = mean((model(x).square().sum(1) * mask).sum(), mask.sum())
            if form == "two means":
                loss = loss + mean(model.module.weight.square().sum(), 1)
            loss.backward()
        model.require_backward_grad_sync = True
        optimizer.step()
        optimizer.zero_grad()
        times.append(1e3 * (time.process_time() - begun))
    return median(times[20:])


def count_bytes() -> int:
    """Returns how many bytes a call gives to its exchange."""
    sent, original = [], dist.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    fleet.init(is_collective=True, log_level="ERROR")
    model = fleet.distributed_model(nn.Linear(8, 8))
    total = model(torch.randn(4, 8)).sum()
    dist.all_reduce = counted
    fleet.mean(total, 4)
    dist.all_reduce = original
    return sum(sent)


def worker() -> None:
    """Prints the table on worker 0."""
    torch.set_num_threads(1)
    rows = []
    for form in FORMS:
        pairs = []
        for _ in range(3):
            plain = train(form, lambda total, count: total / count)
            pairs.append((plain, train(form, fleet.mean)))
        apart = sorted(there - plain for plain, there in pairs)
        rows.append([form, f"{median(a for a, _ in pairs):.2f}", f"{apart[1]:.2f} ({apart[0]:.2f} to {apart[2]:.2f})"])
    size = count_bytes()
    if fleet.worker_index() == 0:
        head = ["update", "step with total / count, ms of processor", "more with fleet.mean, ms"]
        print(markdown(head, rows))
        print(f"One call gives {size} bytes to one all-reduce; none under no_sync().")


def main() -> None:
    """Starts two workers."""
    if "PADDLE_TRAINER_ID" in os.environ:
        worker()
        return
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", f"--log_dir={logs}", __file__]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
