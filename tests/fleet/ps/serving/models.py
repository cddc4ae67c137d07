"""Models with every form of rows, and the tables that they read, for tests of exports."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.ps import Initializer, Rule, SparseTable, SparseTableConfig, save_table
from tests.fleet.ps._tables import make_asked_rows


class EveryForm(nn.Module):
    """Bags with padding, an ``nn.Embedding``, and flat ids with offsets in two slots of a shared table."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = fleet.SparseEmbedding(4, combiner="sum", padding_idx=0)
        self.plain = nn.Embedding(50, 3, sparse=True)
        self.flat = fleet.SparseEmbedding(2, name="shared", combiner="mean", num_slots=2, separate_slots=True)
        self.net = nn.Sequential(nn.Linear(4 + 6 + 4 + 5, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, bags: Tensor, plain: Tensor, flat: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        """Returns one number per sample."""
        rows = [self.bags(bags), self.plain(plain % 50).flatten(1), self.flat(flat, offsets).flatten(1), dense]
        found: Tensor = self.net(torch.cat(rows, 1)).squeeze(1)
        return found


def inputs(samples: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Returns a batch for :class:`EveryForm`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * samples,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return (
        torch.randint(0, 9, (samples, 3), generator=generator),
        torch.randint(0, 500, (samples, 2), generator=generator),
        torch.randint(-5, 5, (int(offsets[-1]),), generator=generator),
        offsets[:-1],
        torch.randn(samples, 5, generator=generator),
    )


def save_rows(model: EveryForm, folder: Path) -> None:
    """Saves the tables that the servers would have for ``model``."""
    for name, module in (("bags", model.bags), ("shared", model.flat)):
        source = make_asked_rows(module.lookup, lambda: [model(*inputs(20, seed)) for seed in range(20)])
        table = SparseTable(dataclasses.replace(source.config, name=name))
        for block in source.blocks():
            table.insert(block)
        save_table(table, folder)
    plain = SparseTable(SparseTableConfig("plain", 3, Rule("sgd"), initializer=Initializer("constant", 0.0)))
    plain.add(np.arange(50), model.plain.weight.detach().numpy())
    save_table(plain, folder)


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a model and example inputs, for ``python -m fleet.ps export``."""
    torch.manual_seed(1)
    return EveryForm(), inputs(4)


def inputs_alone() -> tuple[Tensor, ...]:
    """Returns what is not enough for ``python -m fleet.ps export``."""
    return inputs(4)
