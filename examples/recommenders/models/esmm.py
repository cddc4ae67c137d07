"""ESMM: entire space multi-task model, purchases learned from all impressions (Ma et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from models.parts import FIELDS, Batch, Fields, Table, click_loss, log_numbers, perceptron


class ESMM(nn.Module):
    """Two networks over shared embeddings: pCTR, the click, and pCVR, the purchase after a click.

    Only the product pCTCVR = pCTR * pCVR is compared with purchases, over all impressions and not over the clicked ones
    alone, so pCVR holds for the impressions that a service ranks.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        layers: sizes of the hidden layers of each network.
    """

    TASKS = ("click", "purchase")
    INPUTS = (*FIELDS, "price")

    def __init__(self, table: Table, dim: int = 8, layers: Sequence[int] = (64, 32)) -> None:
        super().__init__()
        self.fields = Fields(table, dim)
        self.click = perceptron(len(FIELDS) * dim + 1, layers)
        self.conversion = perceptron(len(FIELDS) * dim + 1, layers)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of ``click`` and of ``purchase`` (click and purchase), each [batch]."""
        inputs = torch.cat([self.fields(batch).flatten(1), log_numbers(batch)], 1)
        click, conversion = self.click(inputs).squeeze(1), self.conversion(inputs).squeeze(1)
        # In logarithms, so that small products keep their digits: logit(p) = log p - log(1 - p).
        product = logsigmoid(click) + logsigmoid(conversion)
        return {"click": click, "purchase": product - torch.log(-torch.expm1(product))}

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy of clicks plus that of purchases after a click."""
        return click_loss(outputs, batch)
