"""A worker that trains next to nothing: gloo all_reduce, 50 ms a step; one linear layer where a heartbeat is wanted.

Every start and step goes as one line of JSON into the file that $EVENTS names. Arguments: the exit code with which rank
1 fails at step 5, or -1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(what: str, **more: Any) -> None:
    line = {"t": time.time(), "pid": os.getpid(), "rank": RANK, "world": WORLD, "what": what, **more}
    fd = os.open(os.environ["EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def main() -> None:
    say("start", node=os.environ.get("NODE", ""))
    import torch
    import torch.distributed as dist

    if "FLEET_WORKER_FILE" in os.environ:
        import fleet

        fleet.init(is_collective=True, log_level="ERROR")
        net = fleet.distributed_model(torch.nn.Linear(1, 1))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=1800))
        optimizer = None
    step = 0
    while not os.path.exists(os.environ["EVENTS"] + ".finish"):
        if optimizer is None:
            dist.all_reduce(torch.ones(1))
        else:
            net(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        time.sleep(0.05)
        step += 1
        say("step", step=step)
        if RANK == 1 and step == 5 and int(sys.argv[1]) >= 0:
            raise SystemExit(int(sys.argv[1]))


if __name__ == "__main__":
    main()
