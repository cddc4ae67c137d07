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
    from fleet.ps.server.server import run_server
    from fleet.ps.server.server_config import ServerConfig

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


def main() -> None:
    """Measures and prints one line."""
    import numpy as np

    from fleet.ps.client.client import Client, Gradient
    from fleet.ps.client.link import ClientConfig
    from fleet.ps.table.layout import SparseTableConfig
    from fleet.ps.table.rules import Rule

    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--pushes", type=int, default=2000)
    parser.add_argument("--serve")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain, first, second = endpoint(), endpoint(), endpoint()
        pids = {"without": start(stack, endpoint=plain, folder=f"{folder}/plain")}
        pids["with"] = start(stack, endpoint=first, folder=f"{folder}/first", peer=second)
        start(stack, endpoint=second, folder=f"{folder}/second", peer=first, standby=True)
        clients = {}
        for kind, settings in (("without", {"endpoints": [plain]}), ("with", {"endpoints": [first]})):
            standbys = [second] if kind == "with" else []
            clients[kind] = client = Client(ClientConfig(**settings, standbys=standbys, secret=SECRET))
            client.open()
            client.create_tables({0: SparseTableConfig("ads", DIM, Rule("adagrad", {"learning_rate": 0.1}))})
        rng = np.random.default_rng(0)
        batches = [np.unique(rng.integers(0, 1_000_000, IDS)) for _ in range(50)]
        used: dict[str, list[float]] = {"without": [], "with": []}
        took: dict[str, list[float]] = {"without": [], "with": []}
        for block in range(arguments.blocks + 1):
            for kind, client in clients.items():
                before, begun = processor_s(pids[kind]), time.perf_counter()
                for step in range(arguments.pushes):
                    ids = batches[step % len(batches)]
                    client.wait(client.pull({0: ids}))
                    client.wait(client.push({0: Gradient(ids, np.full((len(ids), DIM), 1e-3, np.float32))}))
                client.flush()
                if block:  # the first one warms up
                    used[kind].append(processor_s(pids[kind]) - before)
                    took[kind].append(time.perf_counter() - begun)
        for client in clients.values():
            client.close()
    cost = [a / b for a, b in zip(used["with"], used["without"], strict=True)]
    rate = [b / a for a, b in zip(took["with"], took["without"], strict=True)]
    print(
        f"server's processor time with a standby / without: {median(cost):.2f} ({min(cost):.2f} to {max(cost):.2f}); "
        f"pushes per second: {median(rate):.2f} ({min(rate):.2f} to {max(rate):.2f})"
    )


if __name__ == "__main__":
    main()
