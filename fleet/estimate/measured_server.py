"""A parameter server as a process of its own for some seconds: its memory without rows, and the ids that a core serves.

``python -m fleet.estimate.measured_server`` is that process; it ends with its standard input.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fleet.common.own_thread import OwnThread
from fleet.errors import PSError
from fleet.ps.client.client import Client
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.client.shards import Gradient, Keys
from fleet.ps.server.measures import resident_bytes
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_process import run_server
from fleet.ps.table.layout import SparseTableConfig

MEASURED_S = 3.0
_WARM_S = 0.5
_MOST_ROWS, _MOST_BYTES = 1_000_000, 256_000_000  # of the tables that are measured; lookups miss the caches by then
_TOGETHER = 50_000


@dataclass(frozen=True)
class MeasuredServer:
    """What was measured.

    Attributes:
        process_bytes: resident memory of a server process whose tables are empty.
        ids_per_s: how many ids a second one core pulls and pushes; ``None`` where it was not asked.
        took_s: seconds of the measurement.
    """

    process_bytes: int
    ids_per_s: float | None
    took_s: float


def measure_server(configs: Sequence[SparseTableConfig], ids_in_message: int | None = None) -> MeasuredServer:
    """Starts a server with these tables, and pulls and pushes random ids if asked.

    Args:
        configs: of the tables; their limits do not apply here.
        ids_in_message: distinct ids of a request, of all tables together.

    Raises:
        PSError: the server did not start.
    """
    began = time.perf_counter()
    with _serving(configs) as (client, process):
        memory = int(resident_bytes(process))
        rate = None if ids_in_message is None else _rate(client, len(configs), process, ids_in_message)
    return MeasuredServer(memory, rate, time.perf_counter() - began)


def _rate(client: Client, tables: int, process: int, ids_in_message: int) -> float:
    """Returns ids per second of the server's processor time."""
    rng = np.random.default_rng(0)
    row_bytes = 12 * sum(client.tables[table_id].dim for table_id in range(tables))
    known = np.unique(rng.integers(-(2**63), 2**63 - 1, max(1000, min(_MOST_ROWS // tables, _MOST_BYTES // row_bytes))))
    count = min(_TOGETHER, len(known), max(1, ids_in_message // tables))

    def push(ids: Keys) -> None:
        rows = (np.full((len(ids), client.tables[table_id].push_dim), 1e-3, np.float32) for table_id in range(tables))
        client.wait(client.push({table_id: Gradient(ids, gradient) for table_id, gradient in enumerate(rows)}))

    def train(seconds: float) -> int:
        done, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            ids = np.unique(rng.choice(known, count))
            client.wait(client.pull(dict.fromkeys(range(tables), ids)))
            push(ids)
            done += tables * len(ids)
        return done

    for part in np.array_split(known, -(-len(known) // _TOGETHER)):
        push(part)
    train(_WARM_S)
    before = _processor_s(process)
    done = train(MEASURED_S)
    return done / max(_processor_s(process) - before, 1e-3)


def _processor_s(process: int) -> float:
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _serving(configs: Sequence[SparseTableConfig]) -> Iterator[tuple[Client, int]]:
    """Yields a client of a server process with empty tables, and the number of the process."""
    secret = secrets.token_bytes(32)
    server = subprocess.Popen(
        [sys.executable, "-m", "fleet.estimate.measured_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it has ended, and its output says so
            server.stdin.write(secret.hex() + "\n")
            server.stdin.flush()
        line = server.stdout.readline()
        if " is listening on " not in line:
            raise PSError(f"the server that is measured did not start: {line.strip() or 'see the lines above'}.")
        # Without the memory of one machine: a job's workers are on others.
        settings = ClientConfig(endpoints=[line.split()[-1]], secret=secret, shares_memory=False)
        client = Client(settings, notify=lambda said: None)
        client.open()
        try:
            client.create_tables({key: replace(config, bounds=None, entry=None) for key, config in enumerate(configs)})
            yield client, server.pid
            client.stop_servers()
        finally:
            client.close()
    finally:
        server.kill()
        server.communicate()


def main() -> None:
    """Serves with the secret in the first line of the standard input, until that ends."""
    import torch

    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())  # a script's servers make model and optimizer, too
    secret = bytes.fromhex(sys.stdin.readline())
    OwnThread(_end_with_input, name="end of the estimate").start()
    run_server(ServerConfig(secret=secret), notify=lambda line: print(line, flush=True))


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
