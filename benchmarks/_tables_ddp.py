"""A worker of plain torch under DDP: a dense table for each feature, ``nn.Embedding(sparse=True)``, on each worker.

Arguments: settings, rank. Writes ``samples.RANK.json`` as :mod:`_tables_fleet` does.
"""

from __future__ import annotations

import json
import sys

import torch
from _recommender_model import MODELS
from _tables_gloo import join, train
from _tables_model import RATE, Separate, by_name, names_of, small_embedding, step_of
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Runs what the settings in argument 1 say."""
    settings, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    join(settings, rank)
    rows = Separate(names_of(settings["tables"]), lambda: small_embedding(settings["ids"]))
    model = DistributedDataParallel(MODELS[settings["model"]](rows, settings["tables"]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    train(settings, rank, model, step_of(model, optimizer), by_name)


if __name__ == "__main__":
    main()
