"""Many rows on one server: created, trained, saved, loaded by another server; memory and time of each part.

python benchmarks/_ps_large.py 50000000
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown  # noqa: E402

from fleet.ps import Client, ClientConfig, Gradient, Rule, ServerConfig, SparseTableConfig, run_server  # noqa: E402

DIM, AT_ONCE = 11, 200_000
SECRET = b"of the benchmark"
CONFIG = SparseTableConfig("ads", DIM, Rule("adagrad"))
# The distance between two ids; odd, so that every id is another one.
SPREAD = 0x1E3779B97F4A7C15


def ids_of(first: int, end: int) -> np.ndarray:
    """Returns distinct ids anywhere in 63 bits."""
    ids: np.ndarray = (np.arange(first, end, dtype=np.uint64) * np.uint64(SPREAD) >> np.uint64(1)).astype(np.int64)
    return ids


def serve() -> None:
    """Runs a server, which ends with its parent's end of the pipe."""
    threading.Thread(target=lambda: (sys.stdin.read(), sys.exit()), daemon=True).start()
    run_server(ServerConfig(endpoint="127.0.0.1:0", secret=SECRET), notify=lambda line: print(line, flush=True))


class Server:
    """A server process and a client of it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        endpoint = self.process.stdout.readline().split()[-1]
        self.client = Client(ClientConfig(endpoints=[endpoint], secret=SECRET), notify=print)
        self.client.open()
        self.client.create_tables({0: CONFIG})

    def make_rows(self, ids: np.ndarray) -> None:
        """Gives the ids rows with their initial weights."""
        self.client.wait(self.client.push({0: Gradient(ids, np.zeros((len(ids), DIM), np.float32))}))

    def peak_bytes(self) -> int:
        """Returns the most memory the process has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    def close(self) -> None:
        """Ends the server."""
        self.client.stop_servers()
        self.client.close()
        self.process.communicate(timeout=60)


def main(rows: int) -> None:
    """Prints a row per part."""
    cells: list[list[str]] = []

    def timed(name: str, server: Server, work: Callable[[], int]) -> None:
        start = time.perf_counter()
        done = work()
        seconds = time.perf_counter() - start
        rate, peak = done / seconds / 1e6, server.peak_bytes() / 1e9
        cells.append([name, f"{done:,}", f"{seconds:.1f}", f"{rate:.2f}", f"{peak:.1f}"])
        print(cells[-1], flush=True)

    def create() -> int:
        for first in range(0, rows, AT_ONCE):
            server.make_rows(ids_of(first, min(rows, first + AT_ONCE)))
        return rows

    def train() -> int:
        rng, gradient = np.random.default_rng(0), np.full((30_000, DIM), 0.01, np.float32)
        for _ in range(100):
            first = int(rng.integers(0, rows - 30_000))
            ids = ids_of(first, first + 30_000)
            server.client.wait(server.client.pull({0: ids}))
            server.client.wait(server.client.push({0: Gradient(ids, gradient)}))
        return 100 * 30_000

    with tempfile.TemporaryDirectory() as folder:
        server = Server()
        timed("rows created", server, create)
        timed("rows pulled and pushed", server, train)
        timed("rows saved", server, lambda: server.client.save(f"{folder}/save"))
        some = ids_of(rows // 2, rows // 2 + 30_000)
        before = server.client.wait(server.client.pull({0: some}))[0].copy()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        server.close()
        server = Server()
        timed("rows loaded by a new server", server, lambda: server.client.load(f"{folder}/save"))
        assert np.array_equal(server.client.wait(server.client.pull({0: some}))[0], before)
        server.close()
    print(markdown(("part", "rows", "s", "M rows/s", "server's peak, GB"), cells))
    print(f"\n{DIM} columns, Adagrad; the save has {size / 1e9:.1f} GB")


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else main(int(sys.argv[1]))
