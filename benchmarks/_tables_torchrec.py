"""A worker of TorchRec in ``ps.py --only tables``: blocks of steps on sharded tables and in plain torch, in turn.

Runs in an environment of its own, without fleet. An ``EmbeddingBagCollection`` is sharded over the processes by
``DistributedModelParallel`` as its planner decides, exchanged over gloo, and updated by fbgemm's fused Adagrad; dense
gradients are averaged by DDP. Arguments: settings, rank. Writes ``samples.RANK.json`` as :mod:`_tables_fleet` does.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _tables_model import (
    DIM,
    RATE,
    Batch,
    Clicks,
    Gauges,
    Measured,
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
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

NUM_WORKERS = 2
CALIBRATION_STEPS = 20


class Bags(nn.Module):
    """The rows of all features side by side."""

    def __init__(self, num_tables: int, num_ids: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=num_ids, feature_names=[name])
            for name in names_of(num_tables)
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(torch.optim.Adagrad, self.tables.parameters(), {"lr": RATE})

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns the rows of a batch."""
        rows: Tensor = self.tables(ids).values()
        return rows


def main() -> None:
    """Runs what the settings in argument 1 say."""
    settings, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = f"file://{settings['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_WORKERS)
    model = DistributedModelParallel(
        Clicks(Bags(settings["tables"], settings["ids"]), settings["tables"]), device=torch.device("cpu")
    )
    Path(settings["folder"], f"plan.{rank}").write_text(described(model))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=RATE))
    steps = {
        "plain": plain_torch(settings["tables"], settings["ids"], torch.optim.Adagrad),
        "served": step_of(model, optimizer),
    }
    found = measure(settings, steps, rank)
    Path(settings["folder"], f"samples.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def described(model: DistributedModelParallel) -> str:
    """Returns how many tables are sharded in which way."""
    shards = [shard for tables in model.plan.plan.values() for shard in tables.values()]
    ways = Counter(f"{shard.sharding_type} {shard.compute_kernel}" for shard in shards)
    return ", ".join(f"{count} tables {way}" for way, count in ways.items())


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    """Returns ids (tables, batch) in TorchRec's form."""
    return KeyedJaggedTensor(names_of(len(ids)), ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32))


def measure(
    settings: dict[str, Any], steps: dict[str, Callable[[Batch], None]], rank: int
) -> dict[str, dict[str, list[Measured]]]:
    """Returns the blocks of each kind by batch size."""
    samples = draw(settings["tables"], settings["ids"], 1 + rank)
    gauges = {"own_s": time.process_time}
    found: dict[str, dict[str, list[Measured]]] = {}
    for size in settings["batches"]:
        batches = {"plain": batches_of(samples, size, by_name), "served": batches_of(samples, size, jagged)}
        # A step needs both workers, so they agree on a number of steps that takes the time of a block.
        tried = block(steps["served"], batches["served"], gauges, steps=CALIBRATION_STEPS)
        agreed = torch.tensor(tried["steps"] / tried["wall_s"] * settings["seconds"])
        dist.all_reduce(agreed)
        limits = {
            "served": {"steps": max(1, round(agreed.item() / NUM_WORKERS))},
            "plain": {"seconds": settings["seconds"]},
        }

        measured = partial(together, steps, batches, limits, gauges)
        found[str(size)] = in_turn(steps, settings["blocks"], measured)
    return found


def together(
    steps: Mapping[str, Callable[[Batch], None]],
    batches: Mapping[str, Iterable[Batch]],
    limits: Mapping[str, Mapping[str, float]],
    gauges: Gauges,
    kind: str,
) -> Measured:
    """Returns a block of one kind, which all workers begin together."""
    dist.barrier()
    return block(steps[kind], batches[kind], gauges, **limits[kind])


if __name__ == "__main__":
    main()
