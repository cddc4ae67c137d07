"""Measures every strategy against plain data parallel, paired in one run on two processes.

Run from the repository root, on an otherwise idle machine::

    python benchmarks/strategies.py                    # about fifteen minutes
    python benchmarks/strategies.py --only dgc amp     # some of them
    python benchmarks/strategies.py --plot docs/reference/strategies.png
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "examples" / "resnet"))
from _strategy_jobs import JOBS  # noqa: E402
from _table import markdown, ratios, spread  # noqa: E402


def run(name: str, how: str) -> dict[str, Any] | str:
    """Runs one job on two workers; returns what rank 0 wrote, or the last line of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2", f"--log_dir={folder}/log"]
        script = [str(HERE / "_strategy_steps.py"), name, how, str(result)]
        done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=500)
        if done.returncode or not result.exists():
            log = (Path(folder) / "log" / "workerlog.0").read_text().strip().splitlines()
            return log[-1] if log else f"exit code {done.returncode}"
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def measure(name: str, plain_peak_bytes: int) -> list[str]:
    """Returns the row of one strategy."""
    turns, alone = run(name, "turns"), run(name, "alone")
    if isinstance(turns, str) or isinstance(alone, str):
        return [name, str(turns if isinstance(turns, str) else alone)[:80], "", "", "", "", ""]
    job, plain = turns["job"], turns["plain"]
    hand = spread(ratios(job["times"], turns["by hand"]["times"])) if "by hand" in turns else ""
    return [
        name,
        f"{median(job['times']) * 1e3:.0f} ms",
        spread(ratios(job["times"], plain["times"])),
        hand,
        f"{alone['peak_bytes'] / plain_peak_bytes:.2f}",
        f"{sum(job['sent']) / max(sum(plain['sent']), 1) * 100:.1f} %",
        f"{job['loss']:.3f} / {plain['loss']:.3f}",
    ]


def plot(rows: list[list[str]], target: str) -> None:
    """Draws step time and bytes of each strategy relative to plain data parallel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [row for row in rows if row[2]]
    names = [row[0] for row in good]
    times = [float(row[2].split()[0]) for row in good]
    sent = [float(row[5].split()[0]) / 100 for row in good]
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.38 * len(good) + 1.2), sharey=True, layout="constrained")
    for axis, values, title in ((axes[0], times, "step time"), (axes[1], sent, "bytes sent")):
        axis.barh(names, values, color=["#4878a8" if v <= 1.02 else "#c17d3d" for v in values])
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{title}, plain data parallel = 1")
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.2f}" if value >= 0.1 else f" {value:.3f}", va="center", fontsize=8)
        axis.set_xlim(0, max(values) * 1.15)
    axes[0].invert_yaxis()
    figure.savefig(target, dpi=130)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(JOBS), help="these strategies")
    parser.add_argument("--plot", metavar="PNG", help="draw the table")
    args = parser.parse_args()
    peaks: dict[bool, Any] = {adam: run(f"plain_{'adam' if adam else 'sgd'}", "alone") for adam in (False, True)}
    for peak in peaks.values():
        if isinstance(peak, str):
            sys.exit(f"plain data parallel failed: {peak}")
    rows = [measure(name, peaks[JOBS[name][1]]["peak_bytes"]) for name in args.only or JOBS]
    header = [
        "strategy",
        "step",
        "step / plain",
        "step / by hand",
        "peak memory / plain",
        "bytes / plain",
        "loss / plain",
    ]
    print(markdown(header, rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
