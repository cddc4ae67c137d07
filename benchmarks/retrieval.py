"""Measures fleet.ps.ItemIndex while its items change: answers, their age, and recall over time.

    python benchmarks/retrieval.py [--items 100000 1000000] [--kinds exact ivf] [--seconds 60] [--quick]

A process publishes to a folder, as the servers of a job do: every half second a delta, in which a hundredth of the
items has moved towards another cluster, some are new, and some are deleted. This process follows with a Reader and an
ItemIndex and asks for the 100 nearest items of one user after another. A row of the table is a part of that time: the
median and the 99th percentile of the time of a search and of the age of an answer (since the push of the newest changes
that it holds), and recall.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet.ps import Delta, ItemIndex, Reader, RowsDelta
from fleet.ps.publishing.folder_sink import FolderSink

DIM = 64
CLUSTERS = 500
EVERY_S = 0.5
K = 100
QUERIES = 200  # of a measurement of recall
PARTS = 4


def centres() -> np.ndarray:
    """Returns the middles of the clusters; users come from the same ones."""
    return np.random.default_rng(0).normal(size=(CLUSTERS, DIM)).astype(np.float32)


def drawn(draw: np.random.Generator, count: int) -> np.ndarray:
    """Returns vectors around the middles, float32 [count, DIM]."""
    middles = centres()[draw.integers(0, CLUSTERS, count)]
    return middles + draw.normal(size=(count, DIM)).astype(np.float32)


def publish(folder: Path, items: int, changed: float) -> None:
    """Publishes until it is killed."""
    draw = np.random.default_rng(1)
    sink = FolderSink(folder, "bench", "float32")
    ids = np.unique(draw.integers(-(2**62), 2**62, items))
    vectors = drawn(draw, len(ids))
    gone = ids[:0]
    moved = np.arange(len(ids))
    number = 0
    while True:
        rows = RowsDelta("item", ids[moved], vectors[moved], gone)
        sink.write(Delta("bench", 0, 1, "00000001-a", number, number + 1, number, time.time(), number == 0, (rows,)))
        number += 1
        time.sleep(EVERY_S)
        count = max(1, int(changed * items))
        # Hot items change most often; a tenth of a delta are new items, in place of others.
        places = np.unique((len(ids) * draw.random(count) ** 3).astype(np.int64))
        vectors[places] += 0.3 * (drawn(draw, len(places)) - vectors[places])
        leaving = np.setdiff1d(draw.integers(0, len(ids), count // 10), places)
        gone = ids[leaving]
        ids[leaving] = draw.integers(-(2**62), 2**62, len(leaving))
        vectors[leaving] = drawn(draw, len(leaving))
        moved = np.concatenate([places, leaving])
        moved = moved[np.argsort(ids[moved])]


def measure(folder: Path, kind: str, nprobe: int | None, seconds: float) -> list[dict[str, Any]]:
    """Returns a row for each part of the time."""
    began = time.perf_counter()
    with Reader(folder) as reader, ItemIndex(reader, "item", kind=kind, nprobe=nprobe).follow(0.1) as index:
        built_s = time.perf_counter() - began
        stop = threading.Event()
        answers: list[tuple[float, float]] = []
        asker = threading.Thread(target=ask, args=(index, answers, stop))
        asker.start()
        rows = []
        for part in range(PARTS):
            answers.clear()
            time.sleep(seconds / PARTS)
            times, ages = np.array(answers).T
            recall = index.recall(drawn(np.random.default_rng(3), QUERIES), K)
            rows.append({"kind": kind, "items": len(index), "built_s": built_s, "until_s": seconds * (part + 1) / PARTS,
                         "answers": len(times), "times": 1e3 * times, "ages": ages, "recall": recall})  # fmt: skip
        stop.set()
        asker.join()
    return rows


def ask(index: ItemIndex, answers: list[tuple[float, float]], stop: threading.Event) -> None:
    """Notes the seconds of each search and the age of its answer, until ``stop``."""
    queries = drawn(np.random.default_rng(2), 1000)
    number = 0
    while not stop.is_set():
        pushed_at = index.position[0].pushed_at
        began = time.perf_counter()
        index.search(queries[number % 1000 : number % 1000 + 1], K)
        answers.append((time.perf_counter() - began, time.time() - pushed_at))
        number += 1


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table."""
    (p50, p99), (age, oldest) = (np.percentile(row[name], (50, 99)) for name in ("times", "ages"))
    figures = f"{row['until_s']:.0f} | {row['answers']} | {p50:.2f} | {p99:.2f} | {age:.2f} | {oldest:.2f}"
    return f"| {row['kind']} | {row['items']:,} | {row['built_s']:.1f} | {figures} | {row['recall']:.3f} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--kinds", nargs="+", choices=("exact", "ivf"), default=["exact", "ivf"])
    parser.add_argument("--nprobe", type=int, help="of ivf (default: as ItemIndex chooses)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row of items and kind")
    parser.add_argument("--changed", type=float, default=0.01, help="part of the items in a delta")
    parser.add_argument("--quick", action="store_true", help="20,000 items, 12 seconds: shows that it runs")
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.items, args.seconds = [20_000], 12.0
    if args.publish:
        publish(args.publish, args.items[0], args.changed)
    print("| kind | items | built s | until s | answers | p50 ms | p99 ms | age p50 s | age p99 s | recall |")
    print("|" + 10 * " --- |")
    for items in args.items:
        for kind in args.kinds:
            with tempfile.TemporaryDirectory() as folder:
                rows = Path(folder, "rows")
                own = [sys.executable, __file__, "--items", str(items), "--changed", str(args.changed)]
                publisher = subprocess.Popen([*own, "--publish", str(rows)], env={**os.environ, "OMP_NUM_THREADS": "1"})
                try:
                    while not (rows / "MANIFEST.json").exists():
                        time.sleep(0.1)
                    for row in measure(rows, kind, args.nprobe if kind == "ivf" else None, args.seconds):
                        print(line(row), flush=True)
                finally:
                    publisher.kill()
                    publisher.wait()


if __name__ == "__main__":
    main()
