"""What fleet.log and the values logged by themselves take of a step.

    python benchmarks/trackers.py          # half a minute

Two workers. ``fleet.log`` of four values: both workers meet first, so that waiting for the other one does not count,
then the call is timed; a bare all-reduce of the same 512 bytes after it. Measuring: steps of a layer so small that
nothing else counts, in blocks with the trackers json and tensorboard and without, in turn, in one process; their
difference is what trackers take of each step beside the calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown  # noqa: E402

STEP_MS = 50.0
CALLS, STEPS, ROUNDS = 400, 400, 8


def log_ms() -> list[float]:
    """Returns the milliseconds of each call of fleet.log on worker 0."""
    import torch
    import torch.distributed as dist

    from fleet import fleet

    start(fleet, sys.argv[2])
    loss, meeting, found = torch.tensor(1.5), torch.zeros(1), []
    for step in range(CALLS):
        dist.all_reduce(meeting)
        began = time.perf_counter()
        fleet.log({"loss": loss, "lr": 0.1, "accuracy": 0.5, "norm": 2.0}, step=step)
        found.append((time.perf_counter() - began) * 1e3)
    return found[20:]


def bare_ms() -> list[float]:
    """Returns the milliseconds of an all-reduce of as many bytes."""
    import torch
    import torch.distributed as dist

    from fleet import fleet

    start(fleet, "")
    meeting, found = torch.zeros(64, dtype=torch.float64), []
    for _ in range(CALLS):
        dist.all_reduce(meeting)
        began = time.perf_counter()
        dist.all_reduce(meeting)
        found.append((time.perf_counter() - began) * 1e3)
    return found[20:]


def step_ms() -> list[float]:
    """Returns the milliseconds by which a tracker makes a step longer, a number a round."""
    from fleet import fleet

    found = []
    for _ in range(ROUNDS):
        pair = []
        for on in (False, True):
            start(fleet, sys.argv[2] if on else "")
            pair.append(steps(fleet))
        found.append(pair[1] - pair[0])
    return found


def start(fleet: Any, folder: str) -> None:
    """Starts a session, with trackers that write to ``folder``."""
    strategy = fleet.DistributedStrategy()
    if folder:
        strategy.trackers = ["json", "tensorboard"]
        strategy.tracker_configs = {"folder": folder}
    fleet.init(is_collective=True, strategy=strategy)


def steps(fleet: Any) -> float:
    """Returns the milliseconds of a step of a small layer."""
    import torch

    model = fleet.distributed_model(torch.nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(8, 4)
    began = 0.0
    for step in range(STEPS):
        if step == 20:
            began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) * 1e3 / (STEPS - 20)


def main() -> None:
    """Runs both parts and prints the table."""
    if len(sys.argv) > 1:
        found = {"log": log_ms, "bare": bare_ms, "step": step_ms}[sys.argv[1]]()
        Path(sys.argv[2], f"{sys.argv[1]}.{os.environ['PADDLE_TRAINER_ID']}").write_text(json.dumps(found))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part, what, workers in (
            ("log", "`fleet.log` of four values, two workers", 2),
            ("bare", "a bare all-reduce of its 512 bytes over gloo", 2),
            ("step", "measuring a step, and its records", 1),
        ):
            command = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={workers}", f"--log_dir={folder}/log"]
            subprocess.run([*command, __file__, part, folder], check=True, capture_output=True)
            values = json.loads(Path(folder, f"{part}.0").read_text())
            middle = median(values)
            low, high = sorted(values)[len(values) // 10], sorted(values)[-1 - len(values) // 10]
            rows.append([what, f"{middle:.3f} ms ({low:.3f}-{high:.3f})", f"{middle / STEP_MS:.2%}"])
    print(markdown(["what", "median (10 % - 90 %)", f"of a step of {STEP_MS:g} ms"], rows))


if __name__ == "__main__":
    main()
