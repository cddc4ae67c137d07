"""DeepFM: a factorization machine and a network over the same embeddings (Guo et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.parts import FIELDS, Batch, Fields, Table, click_loss, log_price, perceptron


class DeepFM(nn.Module):
    """A linear model, the dot products of all pairs of embeddings, and a perceptron, added.

    A row has one value for the linear part, then ``dim`` values of the embedding: one lookup serves both.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        layers: sizes of the hidden layers.
    """

    TASKS = ("click",)
    INPUTS = (*FIELDS, "price")

    def __init__(self, table: Table, dim: int = 8, layers: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.fields = Fields(table, 1 + dim)
        self.linear = nn.Linear(1, 1)
        self.deep = perceptron(len(FIELDS) * dim + 1, layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of ``click`` [batch]."""
        rows, price = self.fields(batch), log_price(batch)
        weights, vectors = rows[..., 0], rows[..., 1:].contiguous()
        # Twice the sum over all pairs is the square of the sum minus the sum of the squares.
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        deep = self.deep(torch.cat([vectors.flatten(1), price], 1))
        return {"click": (self.linear(price) + deep).squeeze(1) + weights.sum(1) + pairs}

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of the clicks."""
        return click_loss(outputs, batch)
