"""A training script for servers and workers alike: ``ps_training.py MODE OUT [--fail=WHAT]``.

Every worker writes its losses and its model to OUT.RANK.pt. ``--fail=worker`` ends worker 1 with code 7 after six
steps; ``--fail=never`` trains until it is stopped, ``--fail=slow`` takes its time.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from fleet import fleet
from tests.helpers.served import WideAndDeep, batches, train


def main(mode: str, out: str, fail: str) -> None:
    """Runs this process's part."""
    role = fleet.PaddleCloudRoleMaker()
    fleet.init(role)
    torch.manual_seed(fleet.worker_index() if fleet.is_worker() else 99)
    net = WideAndDeep()
    factory = fleet.StrategyFactory
    strategy = factory.create_sync_strategy() if mode == "sync" else factory.create_async_strategy()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(net.parameters(), 0.1), strategy)
    model = fleet.distributed_model(net)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    rank, num_workers = fleet.worker_index(), fleet.worker_num()
    losses = []
    for batch in batches(6, rank, num_workers):
        losses += train(model, optimizer, [batch])
        time.sleep(0.5 if fail == "slow" else 0.0)
    if fail == "worker" and rank == 1:
        os._exit(7)
    while fail == "never":
        train(model, optimizer, batches(1, rank, num_workers))
        time.sleep(0.05)
    fleet.save_persistables(f"{out}.tables")
    total = float(fleet.all_reduce(float(rank))) if "PADDLE_MASTER" in os.environ else None
    torch.save({"losses": losses, "model": model.state_dict(), "total": total}, f"{out}.{rank}.pt")
    fleet.stop_worker()


if __name__ == "__main__":
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--fail=")]
    main(sys.argv[1], sys.argv[2], flags[0].split("=")[1] if flags else "")
