"""Rates of one sparse table in one thread: pull and push of dim 16 Adagrad, beside what the memory allows.

Every round measures, one after the other on the same requests, two bare gathers of rows at random places (no ids, no
lookup: numpy.take on packed rows, and a plain loop over rows as far apart as the table's), then the table's pull and
push, so that other load on the machine meets all of them. Rates are per second of this thread's processor time
(median over requests) and, in brackets, the best request by the clock. The shares are of the plain loop.

    python benchmarks/ps_tables.py --rows 1000000 10000000

The study this design comes from measured, on its machine at 10 million rows and zipf ids: plain loop 33.7, pull 12.5,
push 10.4 million rows a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import njit

from fleet.ps import Accessor, Rule, SparseTable, SparseTableConfig

DIM, SPREAD, REQUESTS = 16, 7919, 48
STUDY = {"loop": 33.7, "pull": 12.5, "push": 10.4}
Keys = npt.NDArray[np.int64]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _gather(flat: npt.NDArray[np.float32], places: Keys, out: npt.NDArray[np.float32]) -> None:
    for i in range(len(places)):
        out[i, :] = flat[places[i], : out.shape[1]]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rule", default="adagrad")
    parser.add_argument("--accessor", action="store_true", help="keep statistics per row")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(
        f"{'rows':>10} {'ids':>8} {'B/row':>6} {'fill':>6} | {'gather M rows/s':>16} {'pull':>14} {'push':>14} |"
        f" {'pull/gather':>11} {'push/gather':>11} | {'300 ids us':>10}"
    )
    for rows in arguments.rows:
        accessor = Accessor() if arguments.accessor else None
        config = SparseTableConfig("bench", DIM, Rule(arguments.rule), accessor=accessor)
        table = SparseTable(config, use_kernels=True)
        fill = _fill(table, rows)
        for ids in ("zipf", "uniform"):
            _report(table, rows, ids, fill, arguments.rounds)
        table.close()
    print(
        f"study, 10 M rows, zipf: pull {STUDY['pull']} and push {STUDY['push']} M rows/s beside a loop of "
        f"{STUDY['loop']}, shares {STUDY['pull'] / STUDY['loop']:.2f} and {STUDY['push'] / STUDY['loop']:.2f}"
    )


def _fill(table: SparseTable, rows: int) -> float:
    start = time.thread_time()
    for first in range(0, rows, 30_000):
        table.pull(np.arange(first, min(rows, first + 30_000)) * SPREAD)
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


def _report(table: SparseTable, rows: int, ids: str, fill: float, rounds: int) -> None:
    requests = _requests(rows, ids)
    flat = np.zeros((rows, 2 * DIM), np.float32)
    longest = max(map(len, requests))
    out, gradients = np.empty((longest, DIM), np.float32), np.full((longest, DIM), 1e-3, np.float32)
    packed = np.zeros((rows, DIM), np.float32)
    spent: dict[str, list[tuple[float, float]]] = {"take": [], "loop": [], "pull": [], "push": []}
    for _ in range(rounds):
        for places in requests:
            n, keys = len(places), places * SPREAD
            target = out[:n]
            for name, run in (
                ("take", lambda: np.take(packed, places, axis=0, out=target, mode="clip")),  # noqa: B023
                ("loop", lambda: _gather(flat, places, target)),  # noqa: B023
                ("pull", lambda: table.pull(keys, target)),  # noqa: B023
                ("push", lambda: table.push(keys, gradients[:n])),  # noqa: B023
            ):
                cpu, wall = _seconds(run)
                spent[name].append((cpu / n, wall / n))
    rate = {name: 1e-6 / float(np.median([cpu for cpu, _ in values])) for name, values in spent.items()}
    best = {name: 1e-6 / min(wall for _, wall in values) for name, values in spent.items()}
    few = [(places[:300] * SPREAD).copy() for places in requests]
    step, _ = _seconds(lambda: [(table.pull(keys, out[:300]), table.push(keys, gradients[:300])) for keys in few])
    cells = [f"{rate[name]:6.1f} ({best[name]:5.1f})" for name in spent]
    print(
        f"{rows:>10} {ids:>8} {table.memory_bytes / table.num_rows:6.0f} {fill:6.2f} | {cells[0]:>16} {cells[1]:>14}"
        f" {cells[2]:>14} | {rate['pull'] / rate['gather']:11.2f} {rate['push'] / rate['gather']:11.2f} |"
        f" {step / len(few) * 1e6:10.1f}"
    )


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.thread_time(), time.perf_counter()
    run()
    return time.thread_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
