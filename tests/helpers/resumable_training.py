"""A worker that trains under one strategy, saves its own state after every step, and may kill itself in the middle.

Arguments: strategy, folder of the states, total steps, step after which worker 1 kills itself (-1: never).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fleet

OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 3}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
    "adaptive_localsgd": {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4}},
    "dgc": {"dgc": True, "dgc_configs": {"rampup_begin_step": 1, "rampup_step": 6, "sparsity": [0.5, 0.9, 0.99]}},
}


def main() -> None:
    """Trains, resuming where this worker's newest state was saved."""
    name, folder, steps, kill_after = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    strategy = fleet.DistributedStrategy()
    strategy.update(OPTIONS[name])
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    rank = fleet.worker_index()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 2))
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    # Every worker resumes from the newest step that every worker has: the kill may come between two saves.
    saved = [int(path.stem.split("-")[1]) for path in folder.glob(f"{rank}-*.state")]
    start = int(fleet.all_reduce(max(saved, default=0), "min"))
    if start:
        state = fleet.load(str(folder / f"{rank}-{start}.state"))
        model.set_state_dict(state["model"])
        optimizer.set_state_dict(state["optimizer"])
    for step in range(start, steps):
        x = torch.randn(8, 100, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        fleet.save(state, str(folder / f"{rank}-{step + 1}.state"))
        if step + 1 == kill_after and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
