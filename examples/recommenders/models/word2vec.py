"""word2vec: skip-gram with negative sampling over the items of a session (Mikolov et al. 2013)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import softplus

from models.parts import Batch, Table, mean_rows


class Word2Vec(nn.Module):
    """Items of one session get similar rows; both sides of a pair read one table.

    Args:
        table: makes a table of rows.
        dim: values of a row.
    """

    USER_INPUTS = ("history", "history.offsets")
    ITEM_INPUTS = ("item",)

    def __init__(self, table: Table, dim: int = 16) -> None:
        super().__init__()
        self.items = table("item", dim)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of the pairs [pairs] and of their negatives [pairs, negatives]."""
        centre = self.items(batch["centre"])
        context, negative = self.items(batch["context"]), self.items(batch["negative"])
        return {"pair": (centre * context).sum(1), "negative": (negative @ centre[:, :, None]).squeeze(2)}

    def of_users(self, batch: Batch) -> Tensor:
        """Returns the mean row of each user's history, [batch, dim]."""
        history = batch["history"]
        return mean_rows(self.items(history), history, batch["history.offsets"])

    def of_items(self, batch: Batch) -> Tensor:
        """Returns the rows of the items, [batch, dim]."""
        return self.items(batch["item"])

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of a pair against its negatives, the mean over the pairs."""
        return softplus(-outputs["pair"]).mean() + softplus(outputs["negative"]).sum(1).mean()
