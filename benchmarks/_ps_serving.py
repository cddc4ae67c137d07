"""Measures fleet.ps.Reader: lookups from a folder and from Redis, and how soon a written delta is served.

    python benchmarks/_ps_serving.py [--rows 1000000] [--rounds 50]

Lookups: batches of 1,000 and 100,000 ids of dim 16, nine of ten with a row, from the folder of a publisher with one
base and one delta of a hundredth of the rows, in turn with a bare gather of as many rows by numpy (which knows where
they are); and batches of 1,000 from Redis over a Unix socket, in turn with a bare MGET of the same keys. Served: from
the start of the publisher's write of a delta of 1,000 rows until a lookup has them. ``--json`` adds a line for
``ps.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet.ps import Delta, Reader, RowsDelta
from fleet.ps.publishing.folder_sink import FolderSink

DIM = 16
JOB = "bench"


class Writer:
    """Writes deltas of table ``ads`` to a sink."""

    def __init__(self, sink: Any) -> None:
        self.sink, self.watermark = sink, 0

    def write(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Writes one delta; the first replaces all rows."""
        whole, previous = self.watermark == 0, self.watermark
        self.watermark += 1
        rows = RowsDelta("ads", keys, values, np.empty(0, np.int64))
        self.sink.write(Delta(JOB, 0, 1, "00000001-a", previous, self.watermark, 0, time.time(), whole, (rows,)))


def in_turn(rounds: int, *calls: Callable[[int], object]) -> list[list[float]]:
    """Returns the seconds that each call took in each round."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(-2, rounds):
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            call(max(number, 0))
            if number >= 0:
                taken.append(time.perf_counter() - began)
    return times


def served_ms(writer: Writer, reader: Reader, keys: np.ndarray, rounds: int) -> float:
    """Returns the median of the time from the start of a write until a lookup has the rows."""
    found = []
    for number in range(rounds):
        value = np.float32(number + 1)
        began = time.perf_counter()
        writer.write(keys, np.full((len(keys), DIM), value, np.float32))
        while reader.lookup("ads", keys[:1])[0, 0] != value:
            reader.refresh()
        found.append(time.perf_counter() - began)
    return 1e3 * median(found)


def case(kind: str, ids: int, lookups: list[float], beside: list[float], served: float | None) -> dict[str, Any]:
    """Returns one result."""
    return {
        "source": kind, "ids": ids, "ms": 1e3 * median(lookups), "beside_ms": 1e3 * median(beside),
        "ratio": median(b / a for a, b in zip(lookups, beside, strict=True)), "served_ms": served,
    }  # fmt: skip


def batches_of(keys: np.ndarray, size: int, random: np.random.Generator) -> list[np.ndarray]:
    """Returns ids, nine of ten with a row."""
    found = []
    for _ in range(16):
        batch = random.choice(keys, size)
        batch[::10] = random.integers(-(2**62), 2**62, len(batch[::10]))
        found.append(batch)
    return found


def measure_folder(folder: Path, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the cases of a folder."""
    random = np.random.default_rng(0)
    keys = np.unique(random.integers(-(2**62), 2**62, rows))
    values = random.normal(size=(len(keys), DIM)).astype(np.float32)
    writer = Writer(FolderSink(folder, JOB, "float32"))
    writer.write(keys, values)
    writer.write(keys[::100].copy(), values[::100].copy())
    reader = Reader(folder)
    found = []
    for size in (1000, 100_000):
        batches = batches_of(keys, size, random)
        places = [random.integers(0, len(keys), size) for _ in batches]
        times = in_turn(
            rounds, lambda i, b=batches: reader.lookup("ads", b[i % 16]), lambda i, p=places: values[p[i % 16]]
        )
        found.append(case("folder", size, *times, None))
    found[0]["served_ms"] = served_ms(writer, reader, keys[:1000].copy(), rounds)
    return found


def measure_redis(folder: Path, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the case of Redis; none where it is not installed."""
    if shutil.which("redis-server") is None:
        print("redis-server is not installed: no row for Redis")
        return []
    import redis

    from fleet.ps.publishing.redis_sink import RedisSink

    random = np.random.default_rng(0)
    keys = np.unique(random.integers(-(2**62), 2**62, rows))
    path = folder / "socket"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            time.sleep(0.01)
        url = f"unix://{path}"
        writer = Writer(RedisSink(url, JOB, "float32"))
        writer.write(keys, np.ones((len(keys), DIM), np.float32))
        reader, client = Reader(url), redis.Redis.from_url(url)
        batches = batches_of(keys, 1000, random)
        names = [[f"fleet:{JOB}:ads:{key}" for key in batch.tolist()] for batch in batches]
        times = in_turn(rounds, lambda i: reader.lookup("ads", batches[i % 16]), lambda i: client.mget(names[i % 16]))
        return [case("redis", 1000, *times, served_ms(writer, reader, keys[:1000].copy(), rounds))]
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Prints one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cases = measure_folder(Path(name) / "rows", args.rows, args.rounds)
        cases += measure_redis(Path(name), args.rows // 5, args.rounds)
    for one in cases:
        served = (
            "" if one["served_ms"] is None else f", a delta of 1,000 rows is served after {one['served_ms']:.1f} ms"
        )
        rate = one["ids"] / one["ms"] * 1e3
        print(
            f"{one['source']}, {one['ids']:,} ids: {one['ms']:.3f} ms, {rate / 1e6:.2f} M ids/s; "
            f"{'a gather' if one['source'] == 'folder' else 'MGET'} {one['beside_ms']:.3f} ms{served}"
        )
    if args.json:
        print(json.dumps(cases))


if __name__ == "__main__":
    main()
