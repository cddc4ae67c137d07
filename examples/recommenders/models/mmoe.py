"""MMoE: multi-gate mixture of experts, several tasks over shared experts (Ma et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.parts import FIELDS, Batch, Fields, Table, click_loss, log_numbers, perceptron


class MMoE(nn.Module):
    """Each task mixes the outputs of all experts by a gate of its own, then has a network of its own.

    Args:
        table: makes a table of rows.
        dim: values of an embedding.
        experts: how many.
        width: units of an expert.
        layers: sizes of the hidden layers of each task.
    """

    TASKS = ("click", "purchase")
    INPUTS = (*FIELDS, "price")

    def __init__(
        self,
        table: Table,
        dim: int = 8,
        experts: int = 4,
        width: int = 32,
        layers: Sequence[int] = (32,),
    ) -> None:
        super().__init__()
        inputs = len(FIELDS) * dim + 1
        self.fields = Fields(table, dim)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(inputs, width), nn.ReLU()) for _ in range(experts))
        self.gates = nn.ModuleDict({task: nn.Linear(inputs, experts) for task in self.TASKS})
        self.towers = nn.ModuleDict({task: perceptron(width, layers) for task in self.TASKS})

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits of each task [batch]."""
        inputs = torch.cat([self.fields(batch).flatten(1), log_numbers(batch)], 1)
        found = torch.stack([expert(inputs) for expert in self.experts], 1)  # [batch, experts, width]
        logits = {}
        for task, tower in self.towers.items():
            shares = self.gates[task](inputs).softmax(1)
            logits[task] = tower((shares[:, :, None] * found).sum(1)).squeeze(1)
        return logits

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the cross-entropy summed over the tasks."""
        return click_loss(outputs, batch)
