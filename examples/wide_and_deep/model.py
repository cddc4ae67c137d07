"""WideDeep and DeepFM over a given table of embeddings, in this process or on parameter servers.

Both take ids (batch, columns), int64, and dense numbers (batch, num_dense), and return logits (batch,). The columns of
a slot are adjacent; a slot with several ids sums their rows. Id 0 is padding: its row is zero.

A row of the table has one value for the linear part, then ``dim`` values for the embedding. One table for both parts
means one request to the servers per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Table = Callable[[int], nn.Module]


class HashedEmbedding(nn.Embedding):
    """Rows for unbounded ids in a fixed number of buckets; ids in the same bucket share its row.

    Args:
        num_buckets: rows of the table; bucket 0 is for the padding.
        dim: values per row.
    """

    def __init__(self, num_buckets: int, dim: int) -> None:
        super().__init__(num_buckets, dim, padding_idx=0, sparse=True)
        nn.init.normal_(self.weight, std=0.01)
        with torch.no_grad():
            self.weight[0] = 0

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of int64 ids (...), float32 (..., dim); gradients are sparse."""
        buckets = torch.where(input == 0, 0, input % (self.num_embeddings - 1) + 1)
        return super().forward(buckets)


class SlotRows(nn.Module):
    """Looks ids up and returns one row per slot.

    Args:
        table: makes the table when it is given the number of values per row.
        slots: ids per slot.
        dim: values of the embedding, beside the one for the linear part.
    """

    pooling: Tensor

    def __init__(self, table: Table, slots: Sequence[int], dim: int) -> None:
        super().__init__()
        self.table = table(1 + dim)
        self.single = all(width == 1 for width in slots)
        pooling = torch.zeros(len(slots), sum(slots))
        owners = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor(slots))
        pooling[owners, torch.arange(sum(slots))] = 1
        self.register_buffer("pooling", pooling, persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the linear weights (batch, slots) and the embeddings (batch, slots, dim)."""
        rows = self.table(ids)
        if not self.single:
            rows = self.pooling @ rows
        return rows[..., 0], rows[..., 1:]


def perceptron(inputs: int, layers: Sequence[int]) -> nn.Sequential:
    """Returns linear layers with ReLU between them and one output."""
    sizes = [inputs, *layers]
    hidden = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1))


class WideDeep(nn.Module):
    """Wide & deep learning (Cheng et al. 2016): a linear model and a network over embeddings, trained together.

    Args:
        table: makes the table of rows, for instance ``fleet.SparseEmbedding``.
        slots: ids per slot.
        num_dense: dense numbers per sample.
        dim: values of an embedding.
        layers: sizes of the hidden layers.
    """

    def __init__(
        self,
        table: Table,
        slots: Sequence[int],
        num_dense: int,
        dim: int = 10,
        layers: Sequence[int] = (400, 400, 400),
    ) -> None:
        super().__init__()
        self.rows = SlotRows(table, slots, dim)
        self.wide = nn.Linear(num_dense, 1)
        self.deep = perceptron(len(slots) * dim + num_dense, layers)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Returns the logits (batch,)."""
        weights, embeddings = self.rows(ids)
        deep = self.deep(torch.cat([embeddings.flatten(1), dense], dim=1))
        logits: Tensor = (self.wide(dense) + deep).squeeze(1) + weights.sum(1)
        return logits


class DeepFM(nn.Module):
    """DeepFM (Guo et al. 2017): a factorization machine and a network over the same embeddings.

    The machine adds, to a linear model, the dot product of every pair of slots' embeddings.

    Args:
        table: makes the table of rows, for instance ``fleet.SparseEmbedding``.
        slots: ids per slot.
        num_dense: dense numbers per sample.
        dim: values of an embedding.
        layers: sizes of the hidden layers.
    """

    def __init__(
        self,
        table: Table,
        slots: Sequence[int],
        num_dense: int,
        dim: int = 10,
        layers: Sequence[int] = (400, 400, 400),
    ) -> None:
        super().__init__()
        self.rows = SlotRows(table, slots, dim)
        self.linear = nn.Linear(num_dense, 1)
        self.deep = perceptron(len(slots) * dim + num_dense, layers)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Returns the logits (batch,)."""
        weights, embeddings = self.rows(ids)
        # Twice the sum over all pairs is the square of the sum minus the sum of the squares.
        pairs = 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)
        deep = self.deep(torch.cat([embeddings.flatten(1), dense], dim=1))
        logits: Tensor = (self.linear(dense) + deep).squeeze(1) + weights.sum(1) + pairs
        return logits


MODELS = {"wide_deep": WideDeep, "deepfm": DeepFM}
