"""A script of a hybrid job: ``hybrid_training.py OUT [--kill]``.

Every trainer writes its rows and its model to OUT.RANK.pt, and a checkpoint after every step. With ``--kill``
trainer 1 is killed in its sixth step, once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import torch

from fleet import fleet
from tests.helpers.served import WideAndDeep, batches, train

STEPS = 8


def newest(out: str, num_workers: int) -> int:
    """Returns the last step of which every trainer has a checkpoint; 0 without any."""
    found = [re.fullmatch(r".*\.step(\d+)\.rank(\d+)\.pt", str(path)) for path in Path(out).parent.glob("*.pt")]
    steps = [int(match[1]) for match in found if match]
    return max((step for step in steps if steps.count(step) == num_workers), default=0)


def keep(path: str, state: object) -> None:
    """Writes a file that is whole whenever it is there."""
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def main(out: str, kill: bool) -> None:
    """Runs this process's part."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    fleet.init()
    strategy.hybrid_configs = {"dp_degree": fleet.worker_num()}
    torch.manual_seed(fleet.worker_index() if fleet.is_worker() else 99)
    net = WideAndDeep()
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(net.parameters(), 0.1), strategy)
    model = fleet.distributed_model(net)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    rank, num_workers = fleet.worker_index(), fleet.worker_num()
    first = newest(out, num_workers)
    if first:
        kept = torch.load(f"{out}.step{first}.rank{rank}.pt", weights_only=True)
        net.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    print(f"trainer {rank} goes on after step {first}", flush=True)
    fleet.init_worker()
    for step, batch in enumerate(batches(STEPS, rank, num_workers)[first:], first + 1):
        if kill and rank == 1 and step == 6 and not Path(f"{out}.killed").exists():
            Path(f"{out}.killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, [batch])
        keep(f"{out}.step{step}.rank{rank}.pt", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    fleet.barrier_worker()
    net.words.refresh()
    rows = net.ads.lookup_rows(torch.arange(40) * 10**12)
    keep(f"{out}.{rank}.pt", {"ads": rows, **model.state_dict()})
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1], "--kill" in sys.argv[2:])
