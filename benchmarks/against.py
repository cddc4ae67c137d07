"""Compares this checkout with another one, such as the commit before, in one run: new over old, in turns.

Each turn runs the same job in both checkouts, one after the other, and takes its steps relative to the steps of the
peer that runs beside them in the same processes (plain DDP, torch's own pipeline, a memcpy): what the machine does to
one turn cancels. Run from the repository root, on an otherwise idle machine::

    git worktree add ../before HEAD~1
    python benchmarks/against.py ../before                 # about ten minutes
    python benchmarks/against.py ../before --only collective --turns 9
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown, ratios, spread  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Measured:
    """A job of which both checkouts run the same script of ``benchmarks/``.

    Attributes:
        name: the row of the table.
        script: the script of the worker.
        arguments: of the script; ``{folder}`` stands for a folder of its own, ``{result}`` for the file of its figures.
        ours: the form that is compared.
        peer: the form beside it in the same processes, by which it is divided.
        is_nested: whether the forms stand under ``"times"``.
        workers: how many run it.
    """

    name: str
    script: str
    arguments: Sequence[str]
    ours: str
    peer: str
    is_nested: bool = False
    workers: int = 2


STEPS = ["18", "32", "5", "8", "{result}"]
SAVES = ["200", "5", "{folder}", "{result}", "{}"]
JOBS: dict[str, Sequence[Measured]] = {
    "collective": [
        Measured("step of ResNet-18, over plain DDP", "_collective_steps.py", STEPS, "fleet", "DDP by hand"),
    ],
    "hybrid": [
        Measured("step of mp2, over the same by hand", "_hybrid_steps.py", ["mp", "small", "25", "{result}"],
            "fleet", "hand", is_nested=True),
        Measured("step of pp2, over torch's Schedule1F1B", "_hybrid_steps.py", ["pp", "small", "20", "{result}"],
            "fleet", "torch", is_nested=True),
    ],
    "checkpoint": [
        Measured("save() of 200 MB, over a plain write", "_checkpoint_steps.py", ["writes", *SAVES],
            "fleet", "plain", workers=1),
        Measured("stop of an asynchronous save() of 200 MB, over a memcpy", "_checkpoint_steps.py", ["stops", *SAVES],
            "fleet", "memcpy"),
    ],
}  # fmt: skip


def run(checkout: Path, job: Measured) -> dict[str, Any]:
    """Runs ``job`` in ``checkout``; returns the seconds of each form that rank 0 wrote."""
    own = checkout / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        given = [text.replace("{folder}", folder).replace("{result}", f"{result}") for text in job.arguments]
        command = [
            f"{own}" if own.exists() else sys.executable,
            "-m",
            "fleet.launch",
            f"--nproc_per_node={job.workers}",
        ]
        script = [f"--log_dir={folder}/log", f"benchmarks/{job.script}", *given]
        quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*command, *script], cwd=checkout, env=quiet, capture_output=True, text=True, timeout=500, check=False
        )
        if done.returncode or not result.exists():
            raise SystemExit(f"{checkout}: {job.name}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
        found = json.loads(result.read_text())
    # Checkpoint jobs list the figures of every worker.
    workers = found if isinstance(found, list) else [found["times"] if job.is_nested else found]
    return {name: [max(times) for times in zip(*(one[name] for one in workers), strict=True)] for name in workers[0]}


def compared(job: Measured, old: Path, turns: int) -> list[str]:
    """Returns the row of ``job``: both checkouts over the peer, and new over old, turn by turn."""
    new_ratios: list[float] = []
    old_ratios: list[float] = []
    for turn in range(turns):
        # The order changes, so that what the first of two runs meets hits both.
        for checkout, into in [(ROOT, new_ratios), (old, old_ratios)][:: -1 if turn % 2 else 1]:
            times = run(checkout, job)
            into.append(median(ratios(times[job.ours], times[job.peer])))
    return [job.name, spread(new_ratios), spread(old_ratios), spread(ratios(new_ratios, old_ratios))]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout; its .venv is used where it has one")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    jobs = [job for name in arguments.only for job in JOBS[name]]
    rows = [compared(job, arguments.old.resolve(), arguments.turns) for job in jobs]
    print(markdown(["figure", "new, median (min-max)", "old", "new over old, median (min-max)"], rows))


if __name__ == "__main__":
    main()
