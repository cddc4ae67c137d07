"""A worker or a server of ``ps.py --only tables``: blocks of steps on the servers and in plain torch, in turn.

Each block starts on both workers together and lasts a fixed time, so what another process takes from the machine is
taken from both kinds alike. Messages are counted where a worker sends them to a socket. Writes ``samples.RANK.json``:
by batch size and kind, what :func:`_tables_model.block` returns for each block.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from _tables_model import (
    DIM,
    RATE,
    UNCOUNTED,
    UNCOUNTED_ASYNC,
    Batch,
    Clicks,
    Gauges,
    Ids,
    Measured,
    Separate,
    batches_of,
    block,
    by_name,
    draw,
    in_turn,
    names_of,
    plain_torch,
    step_of,
)
from torch import Tensor, nn

from fleet import fleet
from fleet.ps.wire.transport import SocketConnection

FILLED_TOGETHER = 100_000  # ids of a step that makes rows


class Collection(nn.Module):
    """One collection of all tables, and their rows side by side."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.tables = fleet.SparseEmbeddings(dict.fromkeys(names, DIM))

    def forward(self, ids: Ids) -> Tensor:
        """Returns the rows of a batch."""
        return torch.cat(list(self.tables(ids).values()), 1)


class Sent:
    """The number of messages that this process has sent to servers."""

    def __init__(self) -> None:
        self.count = 0
        send = SocketConnection.send

        def counted(connection: SocketConnection, buffers: Sequence[Any], timeout_s: float | None = None) -> None:
            self.count += 1
            send(connection, buffers, timeout_s)

        SocketConnection.send = counted  # type: ignore[method-assign]


def main() -> None:
    """Runs what the settings in argument 1 say."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = settings["mode"] in ("async", "geo")
    if settings["mode"] == "geo":
        strategy.a_sync_configs = {"k_steps": 100}
    if settings["mode"] == "hybrid":
        strategy.hybrid_configs = {"dp_degree": fleet.worker_num()}
    rule = getattr(torch.optim, settings["rule"])
    rows = rows_of(settings["variant"], settings["tables"], settings["ids"])
    model = Clicks(rows, settings["tables"])
    optimizer = fleet.distributed_optimizer(rule(model.parameters(), lr=RATE), strategy)
    served = fleet.distributed_model(model)
    if fleet.is_server():
        Path(settings["folder"], f"server.{os.getpid()}").touch()
        fleet.init_server()
        fleet.run_server()
        return
    sent = Sent()
    fleet.init_worker()
    if settings["variant"] != "embedding":
        fill(rows, optimizer, settings["tables"], settings["ids"])
    steps = {
        "plain": plain_torch(settings["tables"], settings["ids"], rule),
        "served": step_of(served, optimizer),
    }
    found = measure(settings, steps, gauges_of(sent, settings["folder"]))
    fleet.barrier_worker()
    Path(settings["folder"], f"samples.{fleet.worker_index()}.json").write_text(json.dumps(found))
    fleet.stop_worker()


def rows_of(variant: str, num_tables: int, num_ids: int) -> nn.Module:
    """Returns the tables as a script of the variant writes them."""
    names = names_of(num_tables)
    if variant == "collection":
        return Collection(names)
    if variant == "embedding":
        return Separate(names, lambda: nn.Embedding(num_ids, DIM, sparse=True))
    return Separate(names, lambda: fleet.SparseEmbedding(DIM))


def fill(rows: nn.Module, optimizer: Any, num_tables: int, num_ids: int) -> None:
    """Makes every row on the servers with a gradient of zeros, so that a step meets tables of the full size."""
    for part in torch.arange(num_ids).split(max(1, FILLED_TOGETHER // num_tables)):
        rows(dict.fromkeys(names_of(num_tables), part)).mul(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def gauges_of(sent: Sent, folder: str) -> Gauges:
    """Returns the processor time of this process, that of all servers (worker 0), and the messages sent."""
    servers = [Path("/proc", path.suffix[1:], "stat") for path in Path(folder).glob("server.*")]
    if not fleet.is_first_worker():
        servers = []
    return {"own_s": time.process_time, "servers_s": lambda: sum(map(used_s, servers)), "messages": lambda: sent.count}


def used_s(stat: Path) -> float:
    """Returns the processor time of the process with a file of that name in /proc."""
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(
    settings: dict[str, Any], steps: dict[str, Callable[[Batch], None]], gauges: Gauges
) -> dict[str, dict[str, list[Measured]]]:
    """Returns the blocks of each kind by batch size."""
    samples = draw(settings["tables"], settings["ids"], 1 + fleet.worker_index())
    found: dict[str, dict[str, list[Measured]]] = {}
    for size in settings["batches"]:
        batches = batches_of(samples, size, by_name)

        def measured(kind: str, batches: Iterable[Batch] = batches) -> Measured:
            if kind == "served" and settings["variant"] == "prefetch":
                batches = fleet.prefetch(batches)
            fleet.barrier_worker()
            uncounted = UNCOUNTED_ASYNC if kind == "served" and settings["mode"] == "async" else UNCOUNTED
            return block(steps[kind], batches, gauges, settings["seconds"], uncounted=uncounted)

        found[str(size)] = in_turn(steps, settings["blocks"], measured)
    return found


if __name__ == "__main__":
    main()
