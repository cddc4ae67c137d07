"""DIN: deep interest network, attention of the item at hand over the user's history (Zhou et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.parts import FIELDS, Batch, Fields, Table, click_loss, log_numbers, owners, perceptron


class DIN(nn.Module):
    """A small network weighs each item of the history against the item at hand; the weighted sum is the interest.

    Weights are not normalised, as in the paper: their sum says how strong an interest is. Histories are flat ids with
    offsets, of any length; ids of 0 in them are padding. Items of the history share the tables of the item at hand.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        attention: hidden units of the network that weighs.
        layers: sizes of the hidden layers.
    """

    TASKS = ("click",)
    INPUTS = (*FIELDS, "price", "history", "history.offsets", "history_category")

    def __init__(self, table: Table, dim: int = 8, attention: int = 16, layers: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.fields = Fields(table, dim)
        self.attention = nn.Sequential(nn.Linear(8 * dim, attention), nn.PReLU(), nn.Linear(attention, 1))
        self.deep = perceptron((len(FIELDS) + 4) * dim + 1, layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of ``click`` [batch]."""
        rows = self.fields(batch)
        tables, history = self.fields.tables, batch["history"]
        target = torch.cat([rows[:, 1], rows[:, 2]], 1)  # item and category
        seen = torch.cat([tables["item"](history), tables["category"](batch["history_category"])], 1)
        interest = self.interest(target, seen, history, owners(history, batch["history.offsets"]))
        inputs = [rows.flatten(1), interest, interest * target, log_numbers(batch)]
        return {"click": self.deep(torch.cat(inputs, 1)).squeeze(1)}

    def interest(self, target: Tensor, seen: Tensor, history: Tensor, owner: Tensor) -> Tensor:
        """Returns the sum of ``seen`` [n, d] by sample, weighted against ``target`` [batch, d]; float32 [batch, d]."""
        own = target.index_select(0, owner)
        weights = self.attention(torch.cat([seen, own, seen - own, seen * own], 1))
        weights = weights * (history != 0)[:, None]
        return torch.zeros_like(target).index_add(0, owner, weights * seen)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of the clicks."""
        return click_loss(outputs, batch)
