"""Measures the parameter server's wire: one client and one server process over loopback.

    python benchmarks/_ps_wire.py [--steps 60] [--rows 1000000] [--repeats 5] [--cases plain unix]

A step pulls the rows of a batch and pushes a gradient for each. Printed per case: milliseconds per step (wall, best
and median of the repeats), server processor time per step and rows per second of it (a row that is pulled and pushed
counts once), and the share of the time that bytes and tables alone would take one after the other: the same bytes
over the same transport without a server behind them, plus the same table calls without a wire. Both are measured
again before each repeat, and the share is the median over the repeats. ``--json`` adds a line for ``ps.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet.ps.client.client import Client, Gradient
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_process import run_server
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTable
from fleet.ps.wire.transport import SocketTransport

DIM = 16
CONFIG = SparseTableConfig("ads", DIM, Rule("adagrad"))
SECRET = b"of the benchmark"
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "journal": {"level": 1},
    "fdatasync": {"level": 2},
    "unix": {"unix": True},
    "bfloat16": {"bfloat16": True},
    "prefetch": {"prefetch": True},
}


def main() -> None:
    """Runs the cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--server", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        serve(json.loads(options.server))
        return
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {options.rows} rows of dim {DIM}, Adagrad")
    full = batches(options.rows, 106_496)
    small = [keys[:300] for keys in full]
    table, found = SparseTable(CONFIG), []
    fill(table.add, options.rows)
    for name, keys in (("full", full), ("300", small)):
        print(f"{name}: about {len(keys[0])} ids", flush=True)
        for label in options.cases:
            result = case(table, keys, options, **CASES[label])
            found.append({"ids": name, "case": label, **result})
            print(
                f"  {label:>9}: {result['wall_ms']:7.3f} ms ({result['best_ms']:.3f} at best), "
                f"{result['rows_per_s'] / 1e6:5.1f} M rows/s; bytes alone {result['bytes_ms']:.3f} ms, tables alone "
                f"{result['tables_ms']:.3f} ms: {100 * result['share']:3.0f} % of both in series; server "
                f"{result['server_ms']:6.3f} ms, {result['rows_per_server_s'] / 1e6:5.1f} M rows per processor second",
                flush=True,
            )
    table.close()
    if options.json:
        print(json.dumps(found))


def batches(rows: int, ids: int) -> list[Any]:
    """Returns the distinct ids of 8 batches; each of 26 inputs draws zipf-distributed ids of its own."""
    rng = np.random.default_rng(0)
    inputs = 26
    weights = np.arange(1, rows // inputs + 1, dtype=np.float64) ** -1.2
    edges = np.cumsum(weights / weights.sum())
    found = []
    for _ in range(8):
        ranks = [np.searchsorted(edges, rng.random(ids // inputs)) * inputs + i for i in range(inputs)]
        found.append(np.unique(scattered(np.concatenate(ranks))))
    return found


def scattered(ranks: Any) -> Any:
    """Returns distinct ids all over the range of 62 bits."""
    return (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(2)).astype(np.int64)


def fill(add: Any, rows: int) -> None:
    """Makes the rows that batches may ask for."""
    zeros = np.zeros((200_000, DIM), np.float32)
    for ids in np.split(scattered(np.arange(rows)), range(len(zeros), rows, len(zeros))):
        add(ids, zeros[: len(ids)])


def limits(table: SparseTable, keys: list[Any]) -> tuple[float, float]:
    """Returns the milliseconds of a step's bytes alone and of its table calls alone."""
    table_times, byte_times = [], []
    out = [np.empty((len(batch), DIM), np.float32) for batch in keys]
    gradients = [np.full((len(batch), DIM), 0.01, np.float32) for batch in keys]
    for number in range(80):
        place = number % len(keys)
        began = time.perf_counter()
        table.pull(keys[place], out[place])
        table.push(keys[place], gradients[place])
        table_times.append(time.perf_counter() - began)
    n = len(keys[0])
    up, down, back = bytearray(76 + 24 + 8 * n), bytearray(76 + 24 + 4 * n * DIM), bytearray(76)
    push = bytearray(76 + 24 + 8 * n + 4 * n * DIM)
    transport = SocketTransport()
    listener = transport.bind("127.0.0.1:0")

    def echo() -> None:
        connection = listener.accept()
        for _ in range(80):
            connection.receive(memoryview(bytearray(up)))
            connection.send([down])
            connection.receive(memoryview(bytearray(push)))
            connection.send([back])
        connection.close()

    if (child := os.fork()) == 0:  # a process, as the server is one
        echo()
        os._exit(0)
    connection = transport.connect(listener.endpoint, 5.0)
    for _ in range(80):
        began = time.perf_counter()
        connection.send([up])
        connection.receive(memoryview(down))
        connection.send([push])
        connection.receive(memoryview(back))
        byte_times.append(time.perf_counter() - began)
    connection.close()
    listener.close()
    os.waitpid(child, 0)
    return 1000 * statistics.median(byte_times), 1000 * statistics.median(table_times)


def serve(settings: dict[str, Any]) -> None:
    """Runs the server process; it ends with its parent's stdin."""
    folder = Path(settings["folder"]) if settings.get("folder") else None
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    config = ServerConfig(
        endpoint=settings["endpoint"], folder=folder, level=settings["level"], snapshot_bytes=1 << 40, secret=SECRET
    )
    run_server(config, notify=lambda line: print(line, flush=True))


def case(
    table: SparseTable,
    keys: list[Any],
    options: argparse.Namespace,
    *,
    level: int = 0,
    unix: bool = False,
    bfloat16: bool = False,
    prefetch: bool = False,
) -> dict[str, float]:
    """Returns what one case took; ``table`` is one in this process, of the same rows."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"unix:{folder}/socket" if unix else "127.0.0.1:0"
        settings = {"endpoint": endpoint, "level": level, "folder": folder + "/state" if level else None}
        server = subprocess.Popen(
            [sys.executable, __file__, "--server", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().split()[-1]
            client = Client(
                ClientConfig(endpoints=[endpoint], secret=SECRET, wire="bfloat16" if bfloat16 else "float32"),
                notify=print,
            )
            client.open()
            client.create_tables({0: CONFIG})
            fill(lambda ids, rows: client.wait(client.add({0: Gradient(ids, rows)})), options.rows)
            found = measure(client, server.pid, table, keys, options, prefetch)
            client.stop_servers()
            client.close()
        finally:
            server.kill()
            server.wait()
            for stream in (server.stdin, server.stdout):
                if stream is not None:
                    stream.close()
    return found


def measure(
    client: Client, pid: int, table: SparseTable, keys: list[Any], options: argparse.Namespace, prefetch: bool
) -> dict[str, float]:
    """Runs the steps, and before each repeat what bytes and tables take without each other."""
    steps = options.steps if len(keys[0]) > 1000 else 40 * options.steps
    gradients = [Gradient(batch, np.full((len(batch), DIM), 0.01, np.float32)) for batch in keys]
    out = [np.empty((len(batch), DIM), np.float32) for batch in keys]
    walls, servers, floors = [], [], []
    for _ in range(options.repeats + 1):  # the first warms up
        floors.append(limits(table, keys))
        began, cpu = time.perf_counter(), processor_s(pid)
        ticket = client.pull({0: keys[0]}, out={0: out[0]})
        for step in range(steps):
            here, following = step % len(keys), (step + 1) % len(keys)
            if prefetch:
                client.wait(ticket)
                pushed = client.push({0: gradients[here]})
                ticket = client.pull({0: keys[following]}, out={0: out[following]})
                client.wait(pushed)
            else:
                client.wait(client.pull({0: keys[here]}, out={0: out[here]}))
                client.wait(client.push({0: gradients[here]}))
        client.wait(ticket)
        walls.append(1000 * (time.perf_counter() - began) / steps)
        servers.append((processor_s(pid) - cpu) / steps)
    wall, server_s = statistics.median(walls[1:]), statistics.median(servers[1:])
    rows = statistics.mean(map(len, keys))
    return {
        "rows": rows,
        "wall_ms": wall,
        "best_ms": min(walls[1:]),
        "rows_per_s": 1000 * rows / wall,
        "bytes_ms": statistics.median(of_bytes for of_bytes, _ in floors[1:]),
        "tables_ms": statistics.median(of_tables for _, of_tables in floors[1:]),
        "share": statistics.median(sum(both) / taken for both, taken in zip(floors[1:], walls[1:], strict=True)),
        "server_ms": 1000 * server_s,
        "rows_per_server_s": rows / max(server_s, 1e-9),
    }


def processor_s(pid: int) -> float:
    """Returns the processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


if __name__ == "__main__":
    main()
