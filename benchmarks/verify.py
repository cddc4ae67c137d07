"""What ``python -m fleet verify`` takes beside the script's own run of the same updates.

    python benchmarks/verify.py          # three minutes

Each example in turn: as a job of two workers, then under ``verify`` with two workers, ``STEPS`` updates both times, one
thread a process. Seconds by the clock, and of processor time of all processes; medians of the ratios pair by pair.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown, ratios, spread  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
STEPS, ROUNDS = 20, 3
GPT = ["--hidden", "64", "--layers", "4", "--length", "32", "--batch-size", "16", "--sample-bytes", "0", "--strategy"]
SCRIPTS = {
    "ResNet-18, width 16, 32x32, batch 32": [
        "examples/resnet/train_fleet_dygraph.py",
        *("--image-size", "32", "--width", "16", "--epochs", "1", "--batch-size", "32", "--max-batches", str(STEPS)),
    ],
    "small GPT, dp 2": [
        "examples/gpt/train_fleet_hybrid.py",
        *(*GPT, str(ROOT / "examples/gpt/configs/dp2.yaml"), "--steps", str(STEPS)),
    ],
}


def timed(command: list[str], folder: str) -> tuple[float, float]:
    """Returns the seconds that a command takes, by the clock and of processor time."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used


def main() -> None:
    """Prints the table."""
    rows = []
    for name, (script, *arguments) in SCRIPTS.items():
        own, compared = [], []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                path = str(ROOT / script)
                own.append(timed(["fleet.launch", "--nproc_per_node=2", path, *arguments], folder))
                verify = ["fleet", "verify", "--steps", str(STEPS), "--timeout", "600", path, "--", *arguments]
                compared.append(timed(verify, folder))
        shares = [spread(ratios([v[i] for v in compared], [o[i] for o in own]), 2) for i in range(2)]
        rows.append([name, spread([o[0] for o in own], 1), spread([v[0] for v in compared], 1), *shares])
    print(markdown(["script", "its job, s", "verify, s", "ratio", "by processor time"], rows))


if __name__ == "__main__":
    main()
