"""Measures training on one GPU beside plain torch: images and tokens a second, peak memory, launch gaps.

One prepared run for a machine that is lent for minutes. Run from the repository root::

    python benchmarks/gpu.py          # on one H100 or H200: at most 8 minutes
    python benchmarks/gpu.py --try    # tiny sizes, also without a GPU: shows that it runs, measures nothing

ResNet-50 (bfloat16, channels last, 256 images a step) and a GPT of 124 M parameters (bfloat16; as it is, with
``to_static`` beside ``torch.compile``, with ``recompute`` beside ``torch.utils.checkpoint``), plain torch and fleet in
turns in one process for each case. Then wide & deep with its network on the GPU and its rows on a server of the CPU:
samples a second, and where a step goes. A case that would end after ``--minutes`` is left out and said so.
"""

from __future__ import annotations

import argparse
import csv
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
from _table import markdown, ratios, spread  # noqa: E402

HERE = Path(__file__).parent
# Case -> its unit, and the seconds after which it is given up on a GPU.
CASES = {
    "resnet": ("images/s", 100),
    "gpt": ("tokens/s", 80),
    "gpt recompute": ("tokens/s", 80),
    "gpt to_static": ("tokens/s", 180),
}
WIDE_DEEP = HERE.parent / "examples" / "wide_and_deep" / "train_fleet_ps.py"
WIDE_DEEP_S = 120
HEADER = ["case", "torch", "fleet", "fleet / torch, asked at least 0.99", "peak memory, fleet / torch", "GPU idle"]


class NoTime(Exception):
    """A case has to be left out: the run would take longer than it may."""


def run(command: list[str], left_s: float, folder: str) -> None:
    """Runs a command in a folder.

    Raises:
        NoTime: it was not done after ``left_s`` seconds.
        SystemExit: it failed; the end of its output is the message.
    """
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    output = Path(folder, "output")
    with output.open("w") as file:
        try:
            options: Any = {"cwd": folder, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
            done = subprocess.run(command, timeout=max(left_s, 0.1), **options)
        except subprocess.TimeoutExpired:
            raise NoTime from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{output.read_text()[-4000:]}")


def row_of(case: str, unit: str, found: dict[str, Any]) -> list[str]:
    """Returns the row of a case from what ``_gpu_steps.py`` wrote."""
    seconds, per_step = found["seconds"], found["per_step"]
    rates = {name: f"{per_step / median(values):,.0f} {unit}" for name, values in seconds.items()}
    peaks = {name: f"{value / 1e9:.2f} GB" if value else "no GPU" for name, value in found["peak_bytes"].items()}
    idle = {name: "no GPU" if value is None else f"{value:.1%}" for name, value in found["idle"].items()}
    return [
        case,
        rates["torch"],
        rates["fleet"],
        spread(ratios(seconds["torch"], seconds["fleet"])),
        f"{peaks['fleet']} / {peaks['torch']}",
        f"{idle['fleet']} / {idle['torch']}",
    ]


def measured(case: str, size: str, left_s: float) -> list[str]:
    """Returns the row of a case; one of dashes when there is no time for it."""
    unit, limit_s = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        try:
            limit_s = left_s if size == "try" else min(left_s, limit_s)
            run([sys.executable, str(HERE / "_gpu_steps.py"), case, size, str(result)], limit_s, folder)
        except NoTime:
            return [case, "left out: no time", *["-"] * (len(HEADER) - 2)]
        return row_of(case, unit, json.loads(result.read_text()))


def wide_deep(size: str, left_s: float) -> list[list[str]]:
    """Returns samples a second of a GPU worker with a CPU server, and the parts of its step, as rows."""
    batch, batches = ("32", "12") if size == "try" else ("4096", "60")
    layers = ["8"] if size == "try" else ["1024", "512", "256"]
    settings = ["--mode", "hybrid", "--batch-size", batch, "--max-batches", batches, "--epochs", "1"]
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=1", "--tracker", "csv"]
        try:
            run([*launcher, str(WIDE_DEEP), *settings, "--layers", *layers], min(left_s, WIDE_DEEP_S), folder)
        except NoTime:
            return [["wide & deep", "left out: no time"]]
        (path,) = Path(folder, "runs").glob("*.csv")
        with path.open(newline="") as file:
            return part_rows(list(csv.DictReader(file)))


def part_rows(values: list[dict[str, str]]) -> list[list[str]]:
    """Returns a row for the rate and for each part of a step: the median of what the worker logged after the start."""
    found: dict[str, list[float]] = {}
    for value in values:
        if value["name"].startswith(("time/", "rate/samples")):
            found.setdefault(value["name"], []).append(float(value["value"]))
    # The first value of each holds the start: compiling, and rows that are new to the servers.
    return [[name, f"{median(numbers[1:] or numbers):,.1f}"] for name, numbers in sorted(found.items())]


def main() -> None:
    """Prints the machine and both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", action="store_true", dest="tiny", help="tiny sizes, also without a GPU")
    parser.add_argument("--only", choices=[*CASES, "wide & deep"], help="one part")
    parser.add_argument("--minutes", type=float, default=8.0, help="what the whole run may take (default: 8)")
    args = parser.parse_args()
    import torch

    if not args.tiny and not torch.cuda.is_available():
        print("Not measured: torch sees no GPU here. --try shows with tiny sizes that everything runs.")
        return
    size = "try" if args.tiny else "full"
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{machine}, torch {torch.__version__}, sizes: {size}", flush=True)
    deadline = time.monotonic() + 60 * args.minutes
    rows = [measured(case, size, deadline - time.monotonic()) for case in CASES if args.only in (None, case)]
    if rows:
        print(markdown(HEADER, rows), flush=True)
    if args.only in (None, "wide & deep"):
        print("\n" + markdown(["wide & deep", "median"], wide_deep(size, deadline - time.monotonic())))


if __name__ == "__main__":
    main()
