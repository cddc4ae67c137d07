"""Rates of tables with a limit and of tables on disk, beside the same table without, in one thread.

``limits``: pull and push of the same requests by a table without a limit, one whose limit is never reached (what the
rank costs), and tables that evict by last push and by count, with room for half of the ids. The share of new rows that
the requests bring to the evicting tables is stated.

``server``: pull and push of a worker to a server with its journal, both in this process and all of it counted, by a
table without a limit and two that evict in turn. A share of the ids of each request has never been seen, so that all
three create as many rows; the others are zipf.

``disk``: a table in memory and one that was given a fifth of its bytes, whose process is measured (RSS). Before the
cold runs the pages of the file are dropped from the page cache, so that they come from the disk.

    python benchmarks/_ps_bounded.py --rows 1000000

Every request meets all tables one after the other, so that other load on the machine meets all of them. Rates are rows
a second, the median over requests: of processor time for the limits, by the clock for the disk, where a thread waits.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleet.ps import (
    Bounds,
    Client,
    ClientConfig,
    Gradient,
    Rule,
    Server,
    ServerConfig,
    SparseTable,
    SparseTableConfig,
)

SPREAD, REQUESTS, SECRET = 7919, 40, b"of the benchmark"
Keys = npt.NDArray[np.int64]
Tables = dict[str, SparseTable]


def main() -> None:
    """Prints both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=["limits", "server", "disk"])
    parser.add_argument("--folder", type=Path, help="where rows on disk lie; a temporary folder by default")
    arguments = parser.parse_args()
    if arguments.part in (None, "limits"):
        _limits(arguments.rows, arguments.rounds)
    if arguments.part in (None, "server"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            _server(arguments.rows, arguments.rounds, Path(folder))
    if arguments.part in (None, "disk"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            _disk(arguments.rows, arguments.rounds, Path(folder))


def _requests(ids: str, keys: int, size: int, seed: int = 0) -> list[Keys]:
    rng, requests = np.random.default_rng(seed), []
    for _ in range(REQUESTS if size > 2000 else 4 * REQUESTS):
        drawn = rng.integers(0, keys, size)
        if ids == "zipf":
            drawn = rng.zipf(1.2, 4 * size) * 2654435761 % keys
        requests.append(rng.permutation(np.unique(drawn)) * SPREAD)
    return requests


def _fill(table: SparseTable, keys: int, dim: int) -> None:
    zeros = np.zeros((20_000, dim), np.float32)
    for first in range(0, keys, len(zeros)):
        found = np.arange(first, min(keys, first + len(zeros))) * SPREAD
        table.push(found, zeros[: len(found)])


def _rates(
    tables: Tables, requests: list[Keys], dim: int, rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    longest = max(map(len, requests))
    out, gradients = np.empty((longest, dim), np.float32), np.full((longest, dim), 1e-3, np.float32)
    spent: dict[str, dict[str, list[float]]] = {name: {"pull": [], "push": []} for name in tables}
    for _ in range(rounds):
        for keys in requests:
            for name, table in tables.items():
                start = clock()
                table.pull(keys, out[: len(keys)])
                middle = clock()
                table.push(keys, gradients[: len(keys)])
                spent[name]["pull"].append((middle - start) / len(keys))
                spent[name]["push"].append((clock() - middle) / len(keys))
    rates = {}
    for name, parts in spent.items():
        both = np.add(parts["pull"], parts["push"])
        rates[name] = {part: 1e-6 / float(np.median(values)) for part, values in parts.items()}
        rates[name]["mean"] = 1e-6 / float(np.mean(both))  # an eviction is in few of the requests
    return rates


def _limits(rows: int, rounds: int) -> None:
    dim, keys = 16, 2 * rows
    print(f"limits: {keys} ids, dim {dim}, Adagrad; 'lru' and 'lfu' have room for {rows}")
    for ids in ("zipf", "uniform"):
        requests = _requests(ids, keys, 30_000)
        bounds = {
            "no limit": None,
            "not reached": Bounds(max_rows=2 * keys),
            "lru": Bounds(max_rows=rows),
            "lfu": Bounds(max_rows=rows, evict="lfu"),
        }
        made = {name: SparseTable(SparseTableConfig("t", dim, Rule("adagrad"), bounds=b)) for name, b in bounds.items()}
        for table in made.values():
            _fill(table, keys, dim)
        new = np.mean([1 - made["lru"].contains(request).mean() for request in requests[:5]])
        for name, rate in _rates(made, requests, dim, rounds, time.thread_time).items():
            print(
                f"{ids:>8} {name:>12}: pull {rate['pull']:5.2f}, push {rate['push']:5.2f}, both, mean "
                f"{rate['mean']:5.2f} M rows/s; {made[name].num_rows} rows, "
                f"{made[name].memory_bytes / made[name].num_rows:.0f} B a row"
            )
        print(f"{'':>8} rows that are new to 'lru' at first: {new:.0%}")
        for table in made.values():
            table.close()


def _server(rows: int, rounds: int, folder: Path) -> None:
    dim, keys = 16, rows
    names = {0: "no limit", 1: "lru", 2: "lfu"}
    bounds = {0: None, 1: Bounds(max_rows=rows), 2: Bounds(max_rows=rows, evict="lfu")}
    tables = {i: SparseTableConfig(f"t{i}", dim, Rule("adagrad"), bounds=b) for i, b in bounds.items()}
    server = Server(ServerConfig(endpoint="127.0.0.1:0", num_workers=1, folder=folder, secret=SECRET), notify=str)
    server.start()
    client = Client(ClientConfig(endpoints=[server.endpoint], rank=0, num_workers=1, secret=SECRET), notify=str)
    client.open()
    client.create_tables(tables)
    served = server.state.tables
    for i in tables:
        _fill(served[i].table, keys, dim)  # type: ignore[attr-defined]
    for share in (0.02, 0.1):
        spent = _serve_requests(client, list(tables), keys, dim, share, rounds)
        for i, times in spent.items():
            mean = float(np.mean(times))
            print(
                f"server, {share:4.0%} new, {names[i]:>8}: pull and push {1e-6 / mean:5.2f} M rows per processor "
                f"second, {float(np.mean(spent[0])) / mean:.2f} of no limit; {served[i].describe()}"
            )
    client.goodbye()
    server.stop()


def _serve_requests(
    client: Client, tables: list[int], keys: int, dim: int, share: float, rounds: int
) -> dict[int, list[float]]:
    """Returns the seconds of processor time a row, request by request."""
    spent: dict[int, list[float]] = {i: [] for i in tables}
    fresh = int(1e12 * share)
    warm = 40
    for number in range(warm + 40 * rounds):
        rng = np.random.default_rng(number)
        found = np.unique(rng.zipf(1.2, 40_000) * 2654435761 % keys)
        new = np.arange(fresh, fresh + round(share * len(found)))
        fresh += len(new)
        request = rng.permutation(np.concatenate((found, new))) * SPREAD
        gradient = Gradient(request, np.full((len(request), dim), 1e-3, np.float32))
        for i in tables:
            start = time.process_time()
            client.wait(client.pull({i: request}))
            client.wait(client.push({i: gradient}))
            if number >= warm:
                spent[i].append((time.process_time() - start) / len(request))
    return spent


def _disk(rows: int, rounds: int, folder: Path) -> None:
    dim = 64
    row_bytes = 4 * 2 * dim
    memory = rows * row_bytes // 5
    bounds = Bounds(rows="disk", memory_bytes=memory)
    cold = SparseTable(SparseTableConfig("d", dim, Rule("adagrad"), bounds=bounds), folder)
    cold.load_kernels()
    before = _resident_bytes()
    _fill(cold, rows, dim)
    highest = _resident_bytes() - before
    for block in cold.blocks():
        highest = max(highest, _resident_bytes() - before - 2 * block.values.nbytes)
    print(
        f"disk: {rows} rows of {row_bytes} bytes, {rows * row_bytes / 1e6:.0f} MB, given {memory / 1e6:.0f} MB; table "
        f"{cold.memory_bytes / 1e6:.0f} MB in memory, {cold.disk_bytes / 1e6:.0f} MB on disk; filled and walked, the "
        f"process grew by {highest / 1e6:.0f} MB"
    )
    warm = SparseTable(SparseTableConfig("m", dim, Rule("adagrad"), bounds=Bounds(max_rows=2 * rows)))
    _fill(warm, rows, dim)
    tables = {"memory": warm, "disk": cold}
    for ids in ("zipf", "uniform"):
        requests = _requests(ids, rows, 2000, seed=rounds)
        _rates(tables, requests[: 2 * REQUESTS], dim, 1, time.perf_counter)  # what is hot comes to memory
        for drop, part in ((False, slice(2 * REQUESTS, -8)), (True, slice(-8, None))):
            if drop:
                _drop_cache(cold)
            for name, rate in _rates(tables, requests[part], dim, 1, time.perf_counter).items():
                cache = "its pages dropped from the page cache" if drop else "its pages in the page cache"
                print(f"{ids:>8} {name:>7}: pull {rate['pull']:6.3f}, push {rate['push']:6.3f} M rows/s; {cache}")
    cold.close()
    warm.close()


def _drop_cache(table: SparseTable) -> None:
    file = table._store._disk._file.fileno()  # type: ignore[union-attr]
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
