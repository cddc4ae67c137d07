"""Rows a second of fleet.ParquetDataset beside pyarrow's own scan of the same columns, in turns, medians.

Run: python benchmarks/parquet.py [--rows 2000000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

import fleet

COLUMNS = ["label", "price", "ids"]


def write(folder: Path, rows: int) -> None:
    """Writes four files: a label, a float, a bag of 8 ids, and a column that nobody reads."""
    random = np.random.default_rng(0)
    for file in range(4):
        n = rows // 4
        bags = pa.ListArray.from_arrays(np.arange(0, 8 * n + 1, 8, np.int32), random.integers(0, 1 << 24, 8 * n))
        columns = {"label": random.integers(0, 2, n), "price": random.random(n), "ids": bags, "other": random.random(n)}
        pyarrow.parquet.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=50_000)


def main() -> None:
    """Prints one line for each way to read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), arguments.rows)
        ordered = fleet.ParquetDataset(name, columns=COLUMNS, batch_size=4096)
        shuffled = fleet.ParquetDataset(name, columns=COLUMNS, batch_size=4096, shuffle_seed=0)
        scanned = pyarrow.dataset.dataset(name)
        ways: dict[str, Callable[[], int]] = {
            "pyarrow": lambda: sum(len(b) for b in scanned.to_batches(columns=COLUMNS, batch_size=4096)),
            "fleet": lambda: sum(len(b["label"]) for b in ordered),
            "fleet, shuffled": lambda: sum(len(b["label"]) for b in shuffled),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, read in ways.items():
                began = time.perf_counter()
                rows = read()
                rates[way].append(rows / (time.perf_counter() - began))
        for way, found in rates.items():
            share = statistics.median(a / b for a, b in zip(found, rates["pyarrow"], strict=True))
            print(f"{way:16} {statistics.median(found):12,.0f} rows/s  {share:.2f} of pyarrow")


if __name__ == "__main__":
    main()
