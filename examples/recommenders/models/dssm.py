"""DSSM: a tower for users and one for items (Huang et al. 2013), with the correction of Yi et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from models.parts import Batch, Fields, Table, log_numbers, mean_rows, perceptron

ITEM_COLUMNS = ("item", "category", "brand", "price")


class UserTower(nn.Module):
    """The vector of a user: of the id, the age, and the mean of the items in the history."""

    def __init__(self, table: Table, items: nn.Module, dim: int, layers: Sequence[int], width: int) -> None:
        super().__init__()
        self.fields = Fields(table, dim, ("user", "age"))
        self.items = items
        self.deep = perceptron(3 * dim, layers, width)

    def forward(self, batch: Batch) -> Tensor:
        """Returns float32 [batch, width] of length 1."""
        history, offsets = batch["history"], batch["history.offsets"]
        seen = mean_rows(self.items(history), history, offsets)
        return normalize(self.deep(torch.cat([self.fields(batch).flatten(1), seen], 1)))


class ItemTower(nn.Module):
    """The vector of an item: of its id, category, brand and price."""

    def __init__(self, table: Table, dim: int, layers: Sequence[int], width: int) -> None:
        super().__init__()
        self.fields = Fields(table, dim, ("item", "category", "brand"))
        self.deep = perceptron(3 * dim + 1, layers, width)

    def forward(self, batch: Batch) -> Tensor:
        """Returns float32 [batch, width] of length 1."""
        return normalize(self.deep(torch.cat([self.fields(batch).flatten(1), log_numbers(batch)], 1)))


class DSSM(nn.Module):
    """Two towers whose dot product ranks items for a user.

    The loss is a softmax over candidates: the items of the batch, and ``negative.item`` that the loader has sampled.
    A popular item is a candidate more often than others; subtracting log q, the logarithm of its probability to be one,
    keeps that from lowering its score. The same item under two users is no negative for either.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        layers: sizes of the hidden layers of a tower.
        width: values of a vector.
        temperature: dot products are divided by it.
        in_batch: whether the other items of the batch are candidates.
    """

    USER_INPUTS = ("user", "age", "history", "history.offsets")
    ITEM_INPUTS = ITEM_COLUMNS

    def __init__(
        self,
        table: Table,
        dim: int = 16,
        layers: Sequence[int] = (64,),
        width: int = 16,
        temperature: float = 0.1,
        in_batch: bool = True,
    ) -> None:
        super().__init__()
        self.item_tower = ItemTower(table, dim, layers, width)
        self.user_tower = UserTower(table, self.item_tower.fields.tables["item"], dim, layers, width)
        self.temperature = temperature
        self.in_batch = in_batch

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the vectors of ``user`` and ``item`` [batch, width], and of ``negative`` [n, width] if there are."""
        found = {"user": self.user_tower(batch), "item": self.item_tower(batch)}
        if "negative.item" in batch:
            found["negative"] = self.item_tower({name: batch[f"negative.{name}"] for name in ITEM_COLUMNS})
        return found

    def of_users(self, batch: Batch) -> Tensor:
        """Returns the vectors of the users, whose product with items ranks them."""
        return self.user_tower(batch)

    def of_items(self, batch: Batch) -> Tensor:
        """Returns the vectors of the items."""
        return self.item_tower(batch)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the mean over the clicked samples; ``log_q`` and ``negative.log_q`` are columns of the batch."""
        ids, log_q, items = batch["item"], batch["log_q"], outputs["item"]
        if "negative" in outputs:
            ids, log_q = torch.cat([ids, batch["negative.item"]]), torch.cat([log_q, batch["negative.log_q"]])
            items = torch.cat([items, outputs["negative"]])
        scores = outputs["user"] @ items.T / self.temperature - log_q
        own = torch.arange(len(batch["item"]), device=ids.device)
        left_out = batch["item"][:, None] == ids
        if not self.in_batch:
            left_out[:, : len(own)] = True
        left_out[own, own] = False
        losses = cross_entropy(scores.masked_fill(left_out, -torch.inf), own, reduction="none")
        return (losses * batch["click"]).sum() / batch["click"].sum().clamp(min=1)
