"""A worker or a server of ``ps.py --only tables``: blocks of steps on the servers and in plain torch, in turn.

Each block starts on both workers together and lasts a fixed time, so what another process takes from the machine is
taken from both kinds alike. Messages are counted where a worker sends them to a socket. Writes ``samples.RANK.json``:
by batch size and kind, what :func:`_tables_model.block` returns for each block.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from _recommender_clicks import resident_bytes
from _recommender_model import MODELS, learn
from _tables_model import (
    DIM,
    RATE,
    START_STD,
    UNCOUNTED,
    UNCOUNTED_ASYNC,
    Batch,
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
    small_embedding,
    step_of,
)
from torch import Tensor, nn

from fleet import fleet
from fleet.ps import Initializer
from fleet.ps.wire.transport import SocketConnection

FILLED_TOGETHER = 100_000  # ids of a step that makes rows


class Collection(nn.Module):
    """One collection of all tables, and their rows side by side."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.tables = fleet.SparseEmbeddings({name: {"dim": DIM, **start_of(i)} for i, name in enumerate(names)})

    def forward(self, ids: Ids) -> Tensor:
        """Returns the rows of a batch."""
        return torch.cat(list(self.tables(ids).values()), 1)


def start_of(number: int) -> dict[str, Any]:
    """Returns how the rows of a feature begin: as those of plain torch, and unlike those of the others."""
    return {"initializer": Initializer("normal", 0.0, START_STD), "seed": number}


class Sent:
    """The number of messages that this process has sent to servers."""

    def __init__(self) -> None:
        self.count = 0
        send = SocketConnection.send

        def counted(connection: SocketConnection, buffers: Sequence[Any], timeout_s: float | None = None) -> None:
            self.count += 1
            send(connection, buffers, timeout_s)

        SocketConnection.send = counted  # type: ignore[method-assign]


def delay_messages(seconds: float) -> None:
    """Lets each message wait before this process sends it, one after the other: at least what a slow cable costs."""
    send = SocketConnection.send

    def delayed(connection: SocketConnection, buffers: Sequence[Any], timeout_s: float | None = None) -> None:
        time.sleep(seconds)
        send(connection, buffers, timeout_s)

    if seconds:
        SocketConnection.send = delayed  # type: ignore[method-assign]


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
    if settings.get("wire"):
        strategy.a_sync_configs = {"wire": settings["wire"]}
    delay_messages(settings.get("delay_s", 0.0))
    if settings["mode"] == "hybrid":
        strategy.hybrid_configs = {"dp_degree": fleet.worker_num()}
    rule = getattr(torch.optim, settings["rule"])
    rows = rows_of(settings["variant"], settings["tables"], settings["ids"])
    make = MODELS[settings["model"]]
    model = make(rows, settings["tables"])
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
    train(settings, served, step_of(served, optimizer), sent)
    fleet.stop_worker()


def train(settings: dict[str, Any], served: Any, step: Callable[[Batch], None], sent: Sent) -> None:
    """Trains on the samples whose AUC is asked for, then measures blocks; writes what was found."""
    gauges, found = gauges_of(sent, settings["folder"]), {}
    if settings["samples"]:
        around = fleet.prefetch if settings["variant"] == "prefetch" else iter
        rank = fleet.worker_index()
        found["learn"] = learn(
            settings, rank, step, served, by_name, gauges, around=around, finish=fleet.barrier_worker
        )
        found["learn"]["resident"] = resident_bytes() + sum(map(resident_bytes, servers_of(settings["folder"])))
        fleet.barrier_worker()
    if settings["blocks"]:
        rule, make = getattr(torch.optim, settings["rule"]), MODELS[settings["model"]]
        steps = {"plain": plain_torch(settings["tables"], settings["ids"], rule, make), "served": step}
        found.update(measure(settings, steps, gauges))
    fleet.barrier_worker()
    Path(settings["folder"], f"samples.{fleet.worker_index()}.json").write_text(json.dumps(found))


def rows_of(variant: str, num_tables: int, num_ids: int) -> nn.Module:
    """Returns the tables as a script of the variant writes them."""
    names = names_of(num_tables)
    if variant == "collection":
        return Collection(names)
    if variant == "embedding":
        return Separate(names, lambda: small_embedding(num_ids))
    numbers = itertools.count()
    return Separate(names, lambda: fleet.SparseEmbedding(DIM, **start_of(next(numbers))))


def fill(rows: nn.Module, optimizer: Any, num_tables: int, num_ids: int) -> None:
    """Makes every row on the servers with a gradient of zeros, so that a step meets tables of the full size."""
    for part in torch.arange(num_ids).split(max(1, FILLED_TOGETHER // num_tables)):
        rows(dict.fromkeys(names_of(num_tables), part)).mul(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def gauges_of(sent: Sent, folder: str) -> Gauges:
    """Returns the processor time of this process, that of all servers (worker 0), the messages and bytes sent."""
    servers = servers_of(folder)
    cable = {"sent_bytes": lambda: cable_bytes()[0], "taken_bytes": lambda: cable_bytes()[1]}
    used = {"own_s": time.process_time, "servers_s": lambda: sum(map(used_s, servers))}
    return {**used, "messages": lambda: sent.count, **cable}


def cable_bytes() -> tuple[int, int]:
    """Returns the bytes that all processes of this node have sent and received on ``eth0``; 0 where there is none."""
    found = re.search(r"^ *eth0: *(\d+)(?: +\d+){7} +(\d+)", Path("/proc/net/dev").read_text(), re.M)
    return (int(found[2]), int(found[1])) if found else (0, 0)


def servers_of(folder: str) -> list[str]:
    """Returns the servers' processes for worker 0, which counts what they use; none for the others."""
    return [path.suffix[1:] for path in Path(folder).glob("server.*")] if fleet.is_first_worker() else []


def used_s(process: str) -> float:
    """Returns the processor time of a process."""
    user, system = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[11:13]
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
