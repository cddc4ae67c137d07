"""SASRec: self-attention over a user's items predicts the next one (Kang and McAuley 2018)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softplus

from models.parts import Batch, Table, padded


class Block(nn.Module):
    """Causal attention and a network for each position, each added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries, self.keys_values = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.deep = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, dim]; a position sees itself and those before it."""
        y = self.norm(x)
        parts = (self.queries(y), *self.keys_values(y).chunk(2, -1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.deep(self.second_norm(x))


class SASRec(nn.Module):
    """Rows of the items and of their positions, through blocks of causal attention.

    Sequences are padded with 0 behind their end, where no earlier position sees it. The output at a position is scored
    against the rows of items: the next one, and sampled ones.

    Args:
        table: makes a table of rows.
        dim: values of a row.
        length: the longest sequence.
        blocks: how many.
        heads: of the attention.
    """

    USER_INPUTS = ("history", "history.offsets")
    ITEM_INPUTS = ("item",)

    def __init__(self, table: Table, dim: int = 32, length: int = 50, blocks: int = 2, heads: int = 1) -> None:
        super().__init__()
        self.items = table("item", dim)
        self.places = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the output at each position, [batch, length, dim], and what ``loss`` scores it against."""
        rows = self.items(batch["items"])
        return {"output": self.encoded(rows), "item": rows, "negative": self.items(batch["negative"])}

    def encoded(self, rows: Tensor) -> Tensor:
        """Returns the output at each position, [batch, length, dim]."""
        x = rows + self.places[: rows.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def of_users(self, batch: Batch) -> Tensor:
        """Returns the output at the last item of each user's history, [batch, dim]."""
        items = padded(batch["history"], batch["history.offsets"], len(self.places))
        last = (items != 0).sum(1).sub(1).clamp(min=0)
        return self.encoded(self.items(items))[torch.arange(last.shape[0]), last]

    def of_items(self, batch: Batch) -> Tensor:
        """Returns the rows of the items, [batch, dim]."""
        return self.items(batch["item"])

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of the next item against ``negative`` [n], the mean over the known positions."""
        output, known = outputs["output"][:, :-1], (batch["items"][:, 1:] != 0).float()
        following = softplus(-(output * outputs["item"][:, 1:]).sum(-1))
        negative = softplus(output @ outputs["negative"].T).mean(-1)
        return ((following + negative) * known).sum() / known.sum().clamp(min=1)
