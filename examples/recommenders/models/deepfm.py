"""DeepFM: a factorization machine and a network over the same embeddings (Guo et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.parts import FIELDS, NUMBERS, Batch, Fields, Table, click_loss, log_numbers, perceptron


class DeepFM(nn.Module):
    """A linear model, the dot products of all pairs of embeddings, and a perceptron, added.

    A row has one value for the linear part, then ``dim`` values of the embedding: one lookup serves both.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        layers: sizes of the hidden layers.
        fields: columns of ids.
        numbers: columns of numbers, at least one.
    """

    TASKS = ("click",)

    def __init__(
        self,
        table: Table,
        dim: int = 8,
        layers: Sequence[int] = (64, 32),
        fields: Sequence[str] = FIELDS,
        numbers: Sequence[str] = NUMBERS,
    ) -> None:
        super().__init__()
        self.INPUTS = (*fields, *numbers)
        self.numbers = tuple(numbers)
        self.fields = Fields(table, 1 + dim, fields)
        self.linear = nn.Linear(len(numbers), 1)
        self.deep = perceptron(len(fields) * dim + len(numbers), layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of ``click`` [batch]."""
        rows, numbers = self.fields(batch), log_numbers(batch, self.numbers)
        weights, vectors = rows[..., 0], rows[..., 1:].contiguous()
        # Twice the sum over all pairs is the square of the sum minus the sum of the squares.
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], 1))
        return {"click": (self.linear(numbers) + deep).squeeze(1) + weights.sum(1) + pairs}

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of the clicks."""
        return click_loss(outputs, batch)
