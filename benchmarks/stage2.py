"""Measures sharding stage 2, which keeps whole parameters, beside torch's ``fully_shard``, which divides them.

The table of ``strategies/sharding/README.md``. Run from the repository root::

    python benchmarks/stage2.py                 # four workers, the GPT example with 17 M parameters, some 4 minutes
    python benchmarks/stage2.py --only steps --rows 8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown, ratios, spread  # noqa: E402

MIB = 2**20
OURS, TORCHS = "stage 2", "fully_shard"


def workers(args: argparse.Namespace, what: str, name: str = "-") -> list[Any]:
    """Returns what each worker of a job found."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [str(number) for number in (args.hidden, args.layers, args.rows, args.length)]
        launch = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={args.workers}", f"--log_dir={folder}/log"]
        command = [*launch, str(Path(__file__).parent / "_stage2_steps.py"), what, name, *sizes, folder]
        quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=1500, check=False)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if done.returncode or len(found) != args.workers:
        raise SystemExit(f"{what} {name}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found


def steps_table(args: argparse.Namespace) -> str:
    """Returns the steps of the forms, stage 2 relative to each block by block: of the slowest worker, and in sum."""
    found = workers(args, "turns")
    wall = {name: [max(times) for times in zip(*(w[name]["wall"] for w in found), strict=True)] for name in found[0]}
    processor = {
        name: [sum(times) for times in zip(*(w[name]["processor"] for w in found), strict=True)] for name in found[0]
    }
    rows = [
        [
            name,
            spread(wall[name]),
            spread(ratios(wall[OURS], wall[name])),
            spread(processor[name]),
            spread(ratios(processor[OURS], processor[name])),
        ]
        for name in found[0]
    ]
    header = ["form", "step, s", "stage 2 over it", "processor of all workers, s", "stage 2 over it"]
    return markdown(header, rows)


def memory_table(args: argparse.Namespace) -> str:
    """Returns the peaks of the worst worker, the median over runs that take turns."""
    peaks: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.turns):
        for name in (OURS, TORCHS):
            found = workers(args, "alone", name)
            for kind in found[0]:
                worst = max(one[kind] for one in found) / MIB
                peaks.setdefault(name, {}).setdefault(kind, []).append(worst)
        print(peaks, file=sys.stderr)
    rows = [[name, *(text for v in kinds.values() for text in (spread(v, 0), ""))] for name, kinds in peaks.items()]
    for row, kinds in zip(rows, peaks.values(), strict=True):
        for place, (kind, values) in enumerate(kinds.items()):
            row[2 + 2 * place] = f"{median(peaks[OURS][kind]) / median(values):.3f}"
    header = ["form", "resident, MiB", "stage 2 over it", "allocated by torch, MiB", "stage 2 over it"]
    return markdown(header, rows)


def distance_table(args: argparse.Namespace) -> str:
    """Returns how far the weights are from one process, in float64."""
    rows = []
    for name in (OURS, TORCHS):
        found = workers(args, "distance", name)
        apart, moved = max(one["apart"] for one in found), max(one["moved"] for one in found)
        rows.append([name, f"{apart:.1e}", f"{moved:.1e}"])
    return markdown(["form", "largest distance from one process", "largest change of a weight"], rows)


TABLES = {"distance": distance_table, "memory": memory_table, "steps": steps_table}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2, help="of each worker, in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=3, help="runs of each form whose memory is measured")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    args = parser.parse_args()
    for name in args.only:
        print(TABLES[name](args), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
