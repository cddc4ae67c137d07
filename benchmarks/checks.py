"""Measures the processor time that the checks take of a step, on two workers; see README.md for what the rows mean.

Run from the repository root::

    python benchmarks/checks.py            # 10 and 100 million parameters, a minute
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import fleet
from fleet.job.listener import HOOKS, Listener
from fleet.job.running import running_job

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown  # noqa: E402

STEPS, EVERY = 24, 10
WIDTHS = {"10 million": 353, "100 million": 1118}  # of 80 layers


class Clock:
    """Adds up the processor time inside every hook of the listeners of ``fleet.checks``, by listener."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, listener: Listener) -> None:
        """Times what ``listener`` hears from now on."""
        for hook in HOOKS:
            if getattr(type(listener), hook) is not getattr(Listener, hook):
                setattr(listener, hook, self._timed(getattr(listener, hook), type(listener).__name__))

    def _timed(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begun = time.process_time()
            try:
                return hook(*args)
            finally:
                self.seconds[name] += time.process_time() - begun

        return run


def measure(label: str, width: int) -> list[list[str]]:
    """Returns the rows for a model of 80 layers."""
    strategy = fleet.DistributedStrategy()
    strategy.check_every = EVERY
    fleet.init(is_collective=True, strategy=strategy)
    torch.set_num_threads(1)
    clock = Clock()
    job = running_job()
    assert job is not None
    listeners = job.listeners
    for listener in {one for hearing in listeners.hearing.values() for one in hearing}:
        if type(listener).__module__.startswith("fleet.checks."):
            clock.watch(listener)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(80)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9))
    model = fleet.distributed_model(net)
    x, times = torch.randn(2, width), []
    for _ in range(STEPS):
        clock.seconds.clear()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(dict(clock.seconds))
    totals = [sum(found.values()) * 1e3 for found in times]
    copies = [found.get("Copies", 0.0) * 1e3 for found in times]
    checked = [step for step in range(3, STEPS) if (step + 1) % EVERY == 0]
    judged = [step for step in range(3, STEPS) if step % EVERY == 0]
    plain = [step for step in range(3, STEPS) if step not in (*checked, *judged)]
    kinds = {"not checked": plain, "checked (digest taken)": checked, "after it (compared)": judged}
    return [
        [
            f"{label} parameters, step {kind}",
            *(f"{median(found[s] for s in steps):.2f} ms" for found in (totals, copies)),
        ]
        for kind, steps in kinds.items()
    ]


def main() -> None:
    """Starts two workers, or measures in one of them."""
    if "PADDLE_TRAINER_ID" in os.environ:
        rows = [row for label, width in WIDTHS.items() for row in measure(label, width)]
        if fleet.is_first_worker():
            Path(sys.argv[1]).write_text(markdown(["processor time of one worker", "all checks", "copies"], rows))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", f"--log_dir={folder}/log", __file__]
        subprocess.run([*command, f"{folder}/table"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print((Path(folder) / "table").read_text())


if __name__ == "__main__":
    main()
