"""A process of a job that ``recommenders.py`` kills: DeepFM on a parameter server, or in plain torch under DDP.

Each step goes as a line ``rank step time pid`` into the file ``steps``, which is what the one who kills reads. A job
of fleet also counts the updates that its server has: the row of a worker in a table of its own takes 1 from each of
them. Argument: settings. Ends before the step that the file ``finish`` names, and writes ``counted.RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _recommender_model import DeepFM
from _tables_fleet import Collection
from _tables_model import RATE, Batch, Ids, Separate, batches_of, by_name, draw, names_of, small_embedding, step_of
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from fleet import fleet
from fleet.ps import Initializer, Rule

BATCH, EVERY = 100, 20  # samples of a step; steps between the files of a worker


class Counted(nn.Module):
    """DeepFM, and a table whose row of a worker changes by the same number in each update."""

    def __init__(self, num_tables: int) -> None:
        super().__init__()
        self.model = DeepFM(Collection(names_of(num_tables)), num_tables)
        self.updates = fleet.SparseEmbedding(
            1, rule=Rule("sgd", {"learning_rate": 1.0}), initializer=Initializer("constant", 0.0)
        )

    def forward(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """Returns the logits, and this worker's row of the table, whose gradient is to be 1."""
        return self.model(ids), self.updates(torch.tensor([fleet.worker_index()])).sum()


def counted_step(model: Any, optimizer: Any) -> Callable[[Batch], None]:
    """Returns a step that also adds one update to the worker's row."""

    def step(batch: Batch) -> None:
        ids, labels = batch
        logits, row = model(ids)
        optimizer.zero_grad()
        (binary_cross_entropy_with_logits(logits, labels) + row).backward()
        optimizer.step()

    return step


def steps(
    settings: dict[str, Any], rank: int, step: Callable[[Batch], None], first: int, keep: Callable[[int], None]
) -> int:
    """Trains until it is told to end; returns how many steps this rank has done."""
    folder = Path(settings["folder"])
    batches = batches_of(draw(settings["tables"], settings["ids"], 1 + rank), BATCH, by_name)
    file = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    finish = folder / "finish"
    for number, batch in zip(count(first), batches, strict=False):
        if finish.exists() and number >= int(finish.read_text()):
            return number
        step(batch)
        os.write(file, b"%d %d %.4f %d\n" % (rank, number, time.time(), os.getpid()))
        if number % EVERY == 0:
            keep(number + 1)
    raise AssertionError("batches never end")


def train_fleet(settings: dict[str, Any]) -> None:
    """Is a server or a worker of fleet; a worker keeps its step, so that its next process repeats none."""
    fleet.init()
    model = Counted(settings["tables"])
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = settings["mode"] == "async"
    optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=RATE), strategy)
    served = fleet.distributed_model(model)
    folder = Path(settings["folder"])
    if fleet.is_server():
        (folder / f"server.{os.getpid()}").touch()
        fleet.init_server()
        fleet.run_server()
        return
    rank = fleet.worker_index()
    kept, first = folder / f"worker.{rank}.pt", 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    fleet.init_worker()

    def keep(step: int) -> None:
        part = kept.with_suffix(".part")
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, part)
        part.replace(kept)

    if not kept.exists():
        keep(0)
    done = steps(settings, rank, counted_step(served, optimizer), first, keep)
    optimizer.state_dict()  # what waits is on the servers then
    row = model.updates.lookup_rows(torch.tensor([rank]))
    share = 1.0 if settings["mode"] == "async" else 1 / fleet.worker_num()  # sync mode applies the mean
    found = {"steps": done, "updates": -float(row) / share}
    (folder / f"counted.{rank}.json").write_text(json.dumps(found))
    fleet.stop_worker()


def train_ddp(settings: dict[str, Any]) -> None:
    """Is a worker of plain torch, which keeps nothing: all of its steps are lost with the job."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = Separate(names_of(settings["tables"]), lambda: small_embedding(settings["ids"]))
    model = DistributedDataParallel(DeepFM(rows, settings["tables"]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    steps(settings, rank, step_of(model, optimizer), 0, lambda step: None)


def main() -> None:
    """Runs what the settings in argument 1 say."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    (train_ddp if settings["mode"] == "ddp" else train_fleet)(settings)


if __name__ == "__main__":
    main()
