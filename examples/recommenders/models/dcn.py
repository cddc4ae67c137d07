"""DCN v2: layers that cross the input with themselves, beside a network (Wang et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.parts import FIELDS, NUMBERS, Batch, Fields, Table, click_loss, log_numbers, perceptron


class DCN(nn.Module):
    """Cross layers ``x' = x0 * (W x + b) + x`` and a perceptron, side by side under one linear layer.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        crosses: number of cross layers.
        rank: ``W`` is the product of two matrices of this rank; ``None`` for a whole matrix.
        layers: sizes of the hidden layers.
        fields: columns of ids.
        numbers: columns of numbers, at least one.
    """

    TASKS = ("click",)

    def __init__(
        self,
        table: Table,
        dim: int = 8,
        crosses: int = 2,
        rank: int | None = None,
        layers: Sequence[int] = (64, 32),
        fields: Sequence[str] = FIELDS,
        numbers: Sequence[str] = NUMBERS,
    ) -> None:
        super().__init__()
        width = len(fields) * dim + len(numbers)
        self.INPUTS = (*fields, *numbers)
        self.numbers = tuple(numbers)
        self.fields = Fields(table, dim, fields)
        self.crosses = nn.ModuleList(_weight(width, rank) for _ in range(crosses))
        self.deep = nn.Sequential(perceptron(width, layers[:-1], layers[-1]), nn.ReLU())
        self.out = nn.Linear(width + layers[-1], 1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of ``click`` [batch]."""
        start = torch.cat([self.fields(batch).flatten(1), log_numbers(batch, self.numbers)], 1)
        crossed = start
        for weight in self.crosses:
            crossed = start * weight(crossed) + crossed
        return {"click": self.out(torch.cat([crossed, self.deep(start)], 1)).squeeze(1)}

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of the clicks."""
        return click_loss(outputs, batch)


def _weight(width: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
