"""Rates of one sparse table in one thread: pull and push of dim 16 Adagrad, beside what the memory allows.

Every round measures, one after the other: a bare gather (numpy.take of packed 64-byte rows at random places: no ids,
no lookup), the table's pull of the same rows, and a push of rows that were last used half a cycle ago, so that other
load on the machine meets all of them and no caches are warm. Rates are per second of this thread's processor time
(median over requests) and, in brackets, the best request by the clock. The shares are of the gather.

    python benchmarks/_ps_kernels.py --rows 1000000 10000000

The study this design comes from measured, on its machine at 10 million rows and zipf ids: gather 33.7, pull 12.5,
push 10.4 million rows a second. ``--json`` adds a line for ``ps.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleet.ps import Accessor, Rule, SparseTable, SparseTableConfig

DIM, SPREAD, REQUESTS = 16, 7919, 48
STUDY = {"gather": 33.7, "pull": 12.5, "push": 10.4}
Keys = npt.NDArray[np.int64]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rule", default="adagrad")
    parser.add_argument("--accessor", action="store_true", help="keep statistics per row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(
        f"{'rows':>9} {'ids':>8} {'B/row':>6} {'fill':>6} | {'gather':>14} {'pull':>14} {'push':>14}"
        f" M rows/s | {'pull/gather':>11} {'push/gather':>11} | {'300 ids us':>10}"
    )
    found: list[dict[str, float | str]] = []
    for rows in arguments.rows:
        accessor = Accessor() if arguments.accessor else None
        config = SparseTableConfig("bench", DIM, Rule(arguments.rule), accessor=accessor)
        table = SparseTable(config)
        before = _resident_bytes()
        fill = _fill(table, rows)
        resident = (_resident_bytes() - before) / rows
        for ids in ("zipf", "uniform"):
            rates = _report(table, rows, ids, fill, arguments.rounds)
            found.append({"rows": rows, "ids": ids, "resident_bytes": resident, **rates})
        table.close()
    print(
        f"study, 10 M rows, zipf: pull {STUDY['pull']} and push {STUDY['push']} M rows/s beside a gather of "
        f"{STUDY['gather']}, shares {STUDY['pull'] / STUDY['gather']:.2f} and {STUDY['push'] / STUDY['gather']:.2f}"
    )
    if arguments.json:
        print(json.dumps(found))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _fill(table: SparseTable, rows: int) -> float:
    start = time.thread_time()
    zeros = np.zeros((30_000, table.config.dim), np.float32)
    for first in range(0, rows, 30_000):
        keys = np.arange(first, min(rows, first + 30_000)) * SPREAD
        table.push(keys, zeros[: len(keys)])
    return rows / (time.thread_time() - start) / 1e6


def _requests(rows: int, ids: str) -> list[Keys]:
    rng, requests = np.random.default_rng(0), []
    for _ in range(REQUESTS):
        drawn = rng.integers(0, rows, 30_000)
        if ids == "zipf":
            # The study's requests: the distinct ids of 4096 samples with 26 features, popular ones anywhere.
            drawn = rng.zipf(1.2, 4096 * 26) * 2654435761 % rows
        distinct = np.unique(drawn)
        requests.append(rng.permutation(distinct))
    return requests


def _report(table: SparseTable, rows: int, ids: str, fill: float, rounds: int) -> dict[str, float]:
    requests = _requests(rows, ids)
    longest = max(map(len, requests))
    out, gradients = np.empty((longest, DIM), np.float32), np.full((longest, DIM), 1e-3, np.float32)
    packed = np.ones((rows, DIM), np.float32)
    spent: dict[str, list[tuple[float, float]]] = {"gather": [], "pull": [], "push": []}
    for number in range(rounds * REQUESTS):
        places = requests[number % REQUESTS]
        keys, older = places * SPREAD, requests[(number + REQUESTS // 2) % REQUESTS] * SPREAD
        _add(spent["gather"], len(keys), partial(np.take, packed, places, 0, out[: len(keys)], "clip"))
        _add(spent["pull"], len(keys), partial(table.pull, keys, out[: len(keys)]))
        _add(spent["push"], len(older), partial(table.push, older, gradients[: len(older)]))
    rate = {name: 1e-6 / float(np.median([cpu for cpu, _ in values])) for name, values in spent.items()}
    best = {name: 1e-6 / min(wall for _, wall in values) for name, values in spent.items()}
    few = [(places[:300] * SPREAD).copy() for places in requests]
    step, _ = _seconds(lambda: [(table.pull(keys, out[:300]), table.push(keys, gradients[:300])) for keys in few])
    cells = [f"{rate[name]:6.1f} ({best[name]:5.1f})" for name in spent]
    print(
        f"{rows:>9} {ids:>8} {table.memory_bytes / table.num_rows:6.0f} {fill:6.2f} |"
        f" {' '.join(f'{cell:>14}' for cell in cells)} M rows/s"
        f" | {rate['pull'] / rate['gather']:11.2f} {rate['push'] / rate['gather']:11.2f}"
        f" | {step / len(few) * 1e6:10.1f}"
    )
    return {**rate, "row_bytes": table.memory_bytes / table.num_rows}


def _add(spent: list[tuple[float, float]], n: int, run: Callable[[], object]) -> None:
    cpu, wall = _seconds(run)
    spent.append((cpu / n, wall / n))


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    run()
    return time.thread_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
