"""What shards that can move cost, and how long a step takes while they do.

    python benchmarks/_ps_scale.py --blocks 5 --pushes 1000 --rows 2000000

Two jobs of two server processes and one worker on this machine, both with a journal of level 1: one has a server in
each process, the other three shards in each, and a third process for them to move to. The worker pulls and pushes the
same 26 x 100 rows of dim 10 in each, block by block in turn. Then the second job gets its rows, and while the worker
goes on, its shards move to three processes and back to two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _ps_standby import DIM, IDS, SECRET, endpoint

SHARDS, PROCESSES = 6, 3


def serve(parts: list[dict[str, Any]]) -> None:
    """Is one server process."""
    from fleet.ps.server.server_config import ServerConfig
    from fleet.ps.server.server_process import run_servers

    for fields in parts:
        fields["folder"] = Path(fields["folder"])
        fields["places"] = tuple(map(tuple, fields.get("places", ())))
    run_servers([(ServerConfig(**fields, secret=SECRET, level=1), None) for fields in parts])


def start(stack: ExitStack, parts: list[dict[str, Any]]) -> None:
    """Starts a server process."""
    process = subprocess.Popen([sys.executable, __file__, "--serve", json.dumps(parts)], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)


def open_client(endpoints: list[str], others: list[list[str]]) -> Any:
    """Returns a client with one table."""
    from fleet.ps.client.client import Client
    from fleet.ps.client.client_config import ClientConfig
    from fleet.ps.table.layout import SparseTableConfig
    from fleet.ps.table.rules import Rule

    client = Client(ClientConfig(endpoints=endpoints, places=others, secret=SECRET))
    client.open()
    client.create_tables({0: SparseTableConfig("ads", DIM, Rule("adagrad", {"learning_rate": 0.1}))})
    return client


def train(client: Any, pushes: int, ids_of: Any) -> list[float]:
    """Pulls and pushes; returns the seconds of each step."""
    import numpy as np

    from fleet.ps.client.client import Gradient

    took = []
    for step in range(pushes):
        ids = ids_of(step)
        began = time.perf_counter()
        client.wait(client.pull({0: ids}))
        client.wait(client.push({0: Gradient(ids, np.full((len(ids), DIM), 1e-3, np.float32))}))
        took.append(time.perf_counter() - began)
    return took


def move(client: Any, places: list[list[str]], ids_of: Any) -> tuple[list[float], list[str]]:
    """Scales to three and back while the worker goes on; returns the steps' seconds and what was said."""
    from fleet.env import Environment
    from fleet.ps_job.scale_command import scale
    from fleet.ps_job.server_line import tell_server

    environment = Environment({"FLEET_JOB_SECRET": SECRET.decode()})
    said: list[str] = []
    failed: list[BaseException] = []

    def order() -> None:
        try:
            for number in (3, 2):
                scale(places[0][0], number, lambda to, fields: tell_server(to, fields, environment), said.append)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=order)
    thread.start()
    took: list[float] = []
    while thread.is_alive():
        took += train(client, 20, ids_of)
    if failed:
        raise failed[0]
    return took, said


def measure(blocks: int, pushes: int, rows: int) -> None:
    """Measures and prints."""
    import numpy as np

    rng = np.random.default_rng(0)
    batches = [np.unique(rng.integers(0, rows, IDS)) for _ in range(50)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = [endpoint() for _ in range(2)]
        places = [[endpoint() for _ in range(SHARDS)] for _ in range(PROCESSES)]
        first = [places[shard % 2][shard] for shard in range(SHARDS)]
        for index, one in enumerate(plain):
            start(stack, [{"endpoint": one, "index": index, "folder": f"{folder}/plain-{index}"}])
        for process, group in enumerate(places):
            parts = [
                {"endpoint": one, "index": shard, "places": places, "standby": one != first[shard]}
                for shard, one in enumerate(group)
            ]
            start(stack, [{**part, "folder": f"{folder}/{process}-{part['index']}"} for part in parts])
        others = [[group[shard] for group in places if group[shard] != one] for shard, one in enumerate(first)]
        clients = {"plain": open_client(plain, []), "shards": open_client(first, others)}
        took: dict[str, list[float]] = {name: [] for name in clients}
        for block in range(blocks + 1):
            for name, client in clients.items():
                seconds = sum(train(client, pushes, lambda step: batches[step % len(batches)]))
                if block:  # the first one warms up
                    took[name].append(seconds)
        share = [here / there for here, there in zip(took["plain"], took["shards"], strict=True)]
        rate = f"{median(share):.2f} ({min(share):.2f} to {max(share):.2f})"
        print(f"pushes per second, six shards / two servers: {rate}")
        clients["plain"].close()
        client = clients["shards"]
        from fleet.ps.client.client import Gradient

        for part in np.array_split(np.arange(rows), max(1, rows // 50_000)):
            client.wait(client.add({0: Gradient(part, np.zeros((len(part), DIM), np.float32))}))
        calm = train(client, 2 * pushes, lambda step: batches[step % len(batches)])
        moving, said = move(client, places, lambda step: batches[step % len(batches)])
        print(f"{rows:,} rows; a step takes {median(calm) * 1e3:.1f} ms, the longest {max(calm) * 1e3:.0f} ms")
        print(f"while shards move: {median(moving) * 1e3:.1f} ms, the longest {max(moving) * 1e3:.0f} ms")
        print("\n".join(said))
        client.close()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--serve")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(json.loads(arguments.serve))
        return
    measure(arguments.blocks, arguments.pushes, arguments.rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
