"""What several models share: the embeddings of the columns, a perceptron, histories, and the loss of clicks.

A batch is a dictionary of tensors. A model takes the columns that its ``INPUTS`` name and returns a dictionary of
outputs; its ``loss`` compares them with the labels of the batch. ``table(name, dim)`` makes a table of rows for 64-bit
ids: on parameter servers, in this process, or wherever the caller likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

Batch = Mapping[str, Tensor]
Table = Callable[[str, int], nn.Module]

FIELDS = ("user", "item", "category", "brand", "age", "hour", "position")
NUMBERS = ("price",)


class Fields(nn.Module):
    """A table for each column of ids.

    Args:
        table: makes a table.
        dim: values of a row.
        names: the columns.
    """

    def __init__(self, table: Table, dim: int, names: Sequence[str] = FIELDS) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: table(name, dim) for name in names})

    def forward(self, batch: Batch) -> Tensor:
        """Returns the rows, float32 [batch, columns, dim]."""
        return torch.stack([table(batch[name]) for name, table in self.tables.items()], 1)


class Vectors(nn.Module):
    """The users or the items of a model that ranks all items, as a module that can be exported alone.

    Args:
        net: DSSM, word2vec or SASRec.
        side: ``"user"`` or ``"item"``.
    """

    def __init__(self, net: nn.Module, side: str) -> None:
        super().__init__()
        self.net = net
        self.side = side
        self.INPUTS: tuple[str, ...] = getattr(net, f"{side.upper()}_INPUTS")

    def forward(self, batch: Batch) -> Tensor:
        """Returns their vectors, float32 [batch, dim]."""
        found: Tensor = getattr(self.net, f"of_{self.side}s")(batch)
        return found


def perceptron(inputs: int, layers: Sequence[int], outputs: int = 1) -> nn.Sequential:
    """Returns linear layers with ReLU between them."""
    sizes = [inputs, *layers]
    hidden = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs))


def log_numbers(batch: Batch, names: Sequence[str] = NUMBERS) -> Tensor:
    """Returns the logarithm of 1 + each number, by its size with its sign, [batch, names]."""
    values = torch.stack([batch[name] for name in names], 1)
    return values.sign() * values.abs().log1p()


def owners(flat: Tensor, offsets: Tensor) -> Tensor:
    """Returns the sample of each flat id, int64 [ids]; ``offsets`` [batch] says where the ids of a sample begin.

    Example:
        >>> owners(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2])).tolist()
        [0, 0, 2]
    """
    places = torch.arange(flat.shape[0], device=flat.device)
    return torch.bucketize(places, offsets, right=True) - 1


def padded(flat: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Returns the last ``length`` ids of each sample and zeros behind them, int64 [batch, length].

    Example:
        >>> padded(torch.tensor([7, 8, 9, 5]), torch.tensor([0, 3]), 2).tolist()
        [[8, 9], [5, 0]]
    """
    ends = torch.cat([offsets[1:], offsets.new_full((1,), flat.shape[0])])
    places = torch.maximum(offsets, ends - length)[:, None] + torch.arange(length, device=flat.device)
    with_zero = torch.cat([flat, flat.new_zeros(1)])
    return with_zero[torch.where(places < ends[:, None], places, flat.shape[0])]


def mean_rows(rows: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
    """Returns the mean of the rows [ids, dim] of each sample, [batch, dim]; ids of 0 do not count."""
    owner, known = owners(flat, offsets), (flat != 0)[:, None].to(rows.dtype)
    sums = rows.new_zeros(offsets.shape[0], rows.shape[1]).index_add(0, owner, rows * known)
    counts = rows.new_zeros(offsets.shape[0], 1).index_add(0, owner, known)
    return sums / counts.clamp(min=1)


def click_loss(outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Returns the cross-entropy of each task's logits [batch] with the label of its name, summed over the tasks."""
    losses = [binary_cross_entropy_with_logits(logits, batch[task]) for task, logits in outputs.items()]
    return torch.stack(losses).sum()
