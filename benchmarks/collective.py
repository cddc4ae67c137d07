"""Measures collective training against what a user would otherwise run; see README.md for what the rows mean.

Run from the repository root, on an otherwise idle machine::

    python benchmarks/collective.py            # about ten minutes
    python benchmarks/collective.py --quick    # about two
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown, ratios, spread  # noqa: E402

HERE = Path(__file__).parent
FLEET = [sys.executable, "-m", "fleet.launch", "--nproc_per_node=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# torchrun's default store hands old addresses to restarted workers; this opt-out lets it recover at all.
TORCHRUN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def step_times(quick: bool) -> list[list[str]]:
    """Returns rows: library, seconds per step, ratio fleet / library, pair by pair."""
    blocks, steps = (5, 5) if quick else (15, 12)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        command = [*FLEET, f"--log_dir={folder}/log", str(HERE / "_collective_steps.py")]
        arguments = ["18", "32", str(blocks), str(steps), str(result)]
        subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times: dict[str, list[float]] = json.loads(result.read_text())
    fleet = times["fleet"]
    return [
        [
            f"step time, ResNet-18 (width 16) 32x32, batch 32, 2 processes: {name}",
            f"{median(t) * 1e3:.1f} ms",
            "1" if name == "fleet" else spread(ratios(fleet, t)),
        ]
        for name, t in times.items()
    ]


def import_times(runs: int) -> list[list[str]]:
    """Returns the row of ``import fleet`` with its first call against ``import torch``."""
    ours, theirs = [], []
    for _ in range(runs):
        ours.append(timed([sys.executable, "-c", "import fleet; fleet.init"]))
        theirs.append(timed([sys.executable, "-c", "import torch"]))
    extra = [a - b for a, b in zip(ours, theirs, strict=True)]
    return [["import fleet; fleet.init, over import torch", f"{median(ours):.2f} s", f"+{spread(extra, 2)} s"]]


def timed(command: Sequence[str]) -> float:
    """Returns the seconds that ``command`` takes."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


class Launched:
    """A launcher running ``_launch_worker.py``; its workers' lines are collected from their logs and its output."""

    def __init__(self, command: list[str], what: str, folder: str, extra: dict[str, str] | None = None) -> None:
        self.folder = Path(folder)
        log = [f"--log_dir={folder}/log"] if "fleet.launch" in command else ["--log-dir", f"{folder}/log", "-t", "3"]
        self.started = time.time()
        self.output = (self.folder / "output").open("w")
        self.process = subprocess.Popen(
            [*command, *log, str(HERE / "_launch_worker.py"), what],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(extra or {})},
        )

    def lines(self, word: str) -> list[tuple[float, int]]:
        """Returns time and process id of each ``word`` line so far, oldest first."""
        text = "\n".join(p.read_text(errors="replace") for p in self.folder.rglob("*") if p.is_file())
        found = {(float(at), int(pid or 0)) for at, pid in re.findall(rf"{word} (\d+\.\d+)(?: (\d+))?", text)}
        return sorted(found)

    def wait_for(self, word: str, count: int, timeout_s: float = 40.0) -> list[tuple[float, int]]:
        """Returns the lines once there are ``count``; an empty list after the timeout or when the launcher ended."""
        deadline = time.time() + timeout_s
        while time.time() < deadline:
            lines = self.lines(word)
            if len(lines) >= count:
                return lines
            if self.process.poll() is not None:
                return []
            time.sleep(0.02)
        return []

    def stop(self) -> None:
        """Ends the launcher."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.output.close()


def launch_start(command: list[str]) -> float:
    """Returns the seconds from starting the launcher to the first line of a worker's script."""
    with tempfile.TemporaryDirectory() as folder:
        job = Launched(command, "exit", folder)
        job.process.wait(60)
        first = job.lines("start")[0][0]
        job.stop()
        return first - job.started


def crash_recovery(command: list[str], extra: dict[str, str] | None = None) -> float | None:
    """Returns the seconds from kill -9 of a worker to the first line of its successor; None if none came."""
    with tempfile.TemporaryDirectory() as folder:
        job = Launched(command, "sleep", folder, extra)
        started = job.wait_for("start", 2)
        killed = time.time()
        os.kill(started[-1][1], signal.SIGKILL)
        again = job.wait_for("start", 3)
        job.stop()
        return again[2][0] - killed if again else None


def failure_to_exit(command: list[str]) -> float:
    """Returns the seconds from an exception in a worker to the end of the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        job = Launched(command, "fail", folder)
        job.process.wait(60)
        ended = time.time()
        failed = job.lines("failing")[0][0]
        job.stop()
        return ended - failed


def launcher_rows(runs: int) -> list[list[str]]:
    """Returns the rows that compare the launcher with torchrun, in turn."""
    start, crash, end = ([], []), ([], []), ([], [])
    for _ in range(runs):
        for place, command in enumerate((FLEET, TORCHRUN)):
            start[place].append(launch_start(command))
            end[place].append(failure_to_exit(command))
            restart = ["--max_restart=1"] if command is FLEET else ["--max-restarts=1"]
            recovered = crash_recovery([*command, *restart], TORCHRUN_STORE if command is TORCHRUN else None)
            if recovered is not None:
                crash[place].append(recovered)
    rows = []
    for what, (ours, theirs) in (
        ("launch to the first line of the script", start),
        ("kill -9 of a worker to the first line of its successor", crash),
        ("exception in a worker to the end of the launcher", end),
    ):
        rows.append([f"{what}: fleet", f"{spread(ours, 2)} s, {len(ours)} of {runs}", "1"])
        paired = spread(ratios(ours, theirs), 2) if len(ours) == len(theirs) else f"{median(ours) / median(theirs):.2f}"
        rows.append([f"{what}: torchrun", f"{spread(theirs, 2)} s, {len(theirs)} of {runs}", paired])
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", choices=("steps", "import", "launch"), help="one part")
    args = parser.parse_args()
    rows: list[list[str]] = []
    if args.only in (None, "steps"):
        rows += step_times(args.quick)
    if args.only in (None, "import"):
        rows += import_times(3 if args.quick else 9)
    if args.only in (None, "launch"):
        rows += launcher_rows(2 if args.quick else 7)
    print(markdown(["measurement", "median (min-max)", "fleet / other, median (min-max)"], rows))


if __name__ == "__main__":
    main()
