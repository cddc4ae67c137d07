"""A worker of TorchRec in ``ps.py --only tables``: blocks of steps on sharded tables and in plain torch, in turn.

Runs in an environment of its own, without fleet. An ``EmbeddingBagCollection`` is sharded over the processes by
``DistributedModelParallel`` as its planner decides, exchanged over gloo, and updated by fbgemm's fused Adagrad; dense
gradients are averaged by DDP. Arguments: settings, rank. Writes ``samples.RANK.json`` as :mod:`_tables_fleet` does.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from _recommender_model import MODELS
from _tables_gloo import join, train
from _tables_model import DIM, RATE, START_STD, names_of, step_of
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


class Bags(nn.Module):
    """The rows of all features side by side."""

    def __init__(self, num_tables: int, num_ids: int) -> None:
        super().__init__()
        common = {"embedding_dim": DIM, "num_embeddings": num_ids, "init_fn": partial(nn.init.normal_, std=START_STD)}
        configs = [
            EmbeddingBagConfig(name=f"t_{name}", feature_names=[name], **common) for name in names_of(num_tables)
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
    join(settings, rank)
    make = MODELS[settings["model"]]
    model = DistributedModelParallel(
        make(Bags(settings["tables"], settings["ids"]), settings["tables"]), device=torch.device("cpu")
    )
    Path(settings["folder"], f"plan.{rank}").write_text(described(model))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=RATE))
    train(settings, rank, model, step_of(model, optimizer), jagged)


def described(model: DistributedModelParallel) -> str:
    """Returns how many tables are sharded in which way."""
    shards = [shard for tables in model.plan.plan.values() for shard in tables.values()]
    ways = Counter(f"{shard.sharding_type} {shard.compute_kernel}" for shard in shards)
    return ", ".join(f"{count} tables {way}" for way, count in ways.items())


def jagged(ids: Tensor) -> KeyedJaggedTensor:
    """Returns ids (tables, batch) in TorchRec's form."""
    return KeyedJaggedTensor(names_of(len(ids)), ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32))


if __name__ == "__main__":
    main()
