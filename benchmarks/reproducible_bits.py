"""Counts the bits in which trainings with ``strategy.reproducible`` differ: one process beside 2, 3, 4, 5 and 8.

The ResNet and the GPT of the examples, with eight logical workers. From the repository root::

    python benchmarks/reproducible_bits.py                              # 1,000 updates: an hour on two cores
    python benchmarks/reproducible_bits.py --updates 50 --only gpt      # a minute

Weights and buffers, optimizer state and the losses of all updates are compared every ``--every`` updates. No variable
is set: each process has the threads that it would have.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from _table import markdown  # noqa: E402

import fleet  # noqa: E402
from tests.helpers.reproducible_training import differing_bits  # noqa: E402

WORKERS = (1, 2, 3, 4, 5, 8)
PARTS = ("weights", "optimizer", "losses")
# What a shell may hold that decides the number of threads.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DYNAMIC")


def train(name: str, workers: int, updates: int, every: int, folder: Path) -> None:
    """Trains on ``workers`` processes, one of them without a launcher; the bits are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    start = ["-m", "fleet.launch", f"--nproc_per_node={workers}", f"--log_dir={folder}/log"] if workers > 1 else []
    script = [str(HERE / "_reproducible_steps.py"), name, f"{updates}", f"{every}", str(folder)]
    environment = {key: value for key, value in os.environ.items() if key not in THREADS}
    environment |= {"FLEET_PAGE": "0", "PYTHONPATH": str(HERE.parent)}
    with (folder / "output").open("w") as output:
        subprocess.run([sys.executable, *start, *script], env=environment, stdout=output, stderr=output, check=True)


def row(name: str, workers: int, folders: Mapping[int, Path]) -> list[str]:
    """Returns the newest update that both have saved, and the bits that differ up to there."""
    saved = [{int(path.name) for path in folders[num].glob("[0-9]*")} for num in (WORKERS[0], workers)]
    marks = sorted(saved[0] & saved[1])
    found: Counter[str] = Counter()
    last: Any = {"forwards": "", "loss": float("nan")}
    for mark in marks:
        one, last = (fleet.load(str(folders[num] / f"{mark}")) for num in (WORKERS[0], workers))
        for path, bits in differing_bits(one["bits"], last["bits"]).items():
            found[path.split("/")[1]] += abs(bits)
    shown = [f"{found[part]:,}" for part in PARTS]
    return [name, f"{workers}", f"{max(marks, default=0):,}", *shown, f"{last['forwards']}", f"{last['loss']:.6f}"]


def main() -> None:
    """Trains and compares what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="updates between two comparisons")
    parser.add_argument("--only", nargs="+", choices=("resnet", "gpt"), default=["resnet", "gpt"])
    parser.add_argument("--workers", nargs="+", type=int, choices=WORKERS, default=[*WORKERS])
    parser.add_argument("--folder", type=Path, help="keep the bits here")
    asked = parser.parse_args()
    head = ["model", "processes", "updates", *(f"bits that differ: {part}" for part in PARTS), "forwards", "last loss"]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        for name in asked.only:
            folders = {num: folder / f"{name}-{num}" for num in (WORKERS[0], *asked.workers)}
            for num in asked.workers:
                train(name, num, asked.updates, asked.every, folders[num])
                rows.append(row(name, num, folders))
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
