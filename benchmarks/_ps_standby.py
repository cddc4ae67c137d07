"""What a standby costs a server: its processor time with one and without, in turn, and the rate of pushes.

    python benchmarks/_ps_standby.py --blocks 7 --pushes 2000

Two jobs of one server and one worker on this machine; the servers keep a journal of level 1, and one has a standby. The
worker pulls and pushes the same 26 x 100 rows of dim 10 in each, block by block in turn. Processor time is that of the
server's process alone, from the system's account; the standby's is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

SECRET = b"of the benchmark"
IDS, DIM = 2600, 10


def serve(fields: dict[str, Any]) -> None:
    """Is one server or standby."""
    from fleet.ps.server.server_config import ServerConfig
    from fleet.ps.server.server_process import run_server

    run_server(ServerConfig(**{**fields, "folder": Path(fields["folder"])}, secret=SECRET, level=1))


def endpoint() -> str:
    """Returns a free one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def start(stack: ExitStack, **fields: Any) -> int:
    """Starts a server and returns its process."""
    process = subprocess.Popen([sys.executable, __file__, "--serve", json.dumps(fields)], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process.pid


def processor_s(pid: int) -> float:
    """Returns the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_client(endpoint: str, standbys: list[str]) -> Any:
    """Returns a client with one table."""
    from fleet.ps.client.client import Client
    from fleet.ps.client.client_config import ClientConfig
    from fleet.ps.table.layout import SparseTableConfig
    from fleet.ps.table.rules import Rule

    client = Client(ClientConfig(endpoints=[endpoint], standbys=standbys, secret=SECRET))
    client.open()
    client.create_tables({0: SparseTableConfig("ads", DIM, Rule("adagrad", {"learning_rate": 0.1}))})
    return client


def train(client: Any, pushes: int) -> None:
    """Pulls and pushes."""
    import numpy as np

    from fleet.ps.client.client import Gradient

    rng = np.random.default_rng(0)
    batches = [np.unique(rng.integers(0, 1_000_000, IDS)) for _ in range(50)]
    for step in range(pushes):
        ids = batches[step % len(batches)]
        client.wait(client.pull({0: ids}))
        client.wait(client.push({0: Gradient(ids, np.full((len(ids), DIM), 1e-3, np.float32))}))
    client.flush()


def measure(blocks: int, pushes: int) -> dict[str, list[tuple[float, float]]]:
    """Returns, for each kind of job, the server's processor time and the seconds of each block."""
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain, first, second = endpoint(), endpoint(), endpoint()
        pids = {"without": start(stack, endpoint=plain, folder=f"{folder}/plain")}
        pids["with"] = start(stack, endpoint=first, folder=f"{folder}/first", peer=second)
        start(stack, endpoint=second, folder=f"{folder}/second", peer=first, standby=True)
        clients = {"without": open_client(plain, []), "with": open_client(first, [second])}
        for block in range(blocks + 1):
            for kind, client in clients.items():
                before, begun = processor_s(pids[kind]), time.perf_counter()
                train(client, pushes)
                if block:  # the first one warms up
                    found[kind].append((processor_s(pids[kind]) - before, time.perf_counter() - begun))
        for client in clients.values():
            client.close()
    return found


def main() -> None:
    """Measures and prints one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--pushes", type=int, default=2000)
    parser.add_argument("--serve")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    found = measure(arguments.blocks, arguments.pushes)
    pairs = list(zip(found["with"], found["without"], strict=True))
    cost = [there[0] / here[0] for there, here in pairs]
    rate = [here[1] / there[1] for there, here in pairs]
    print(
        f"server's processor time with a standby / without: {median(cost):.2f} ({min(cost):.2f} to {max(cost):.2f}); "
        f"pushes per second: {median(rate):.2f} ({min(rate):.2f} to {max(rate):.2f})"
    )


if __name__ == "__main__":
    main()
