"""The recorded saves of Paddle in tests/data/paddle_checkpoint, and the same models and optimizers in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fleet

RECORDED = Path(__file__).parents[1] / "data" / "paddle_checkpoint"
VERSIONS = ("2.6.2", "3.3.1")


class Mixed(nn.Module):
    """make.py's model of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.batch_norm(self.conv(self.words(ids).transpose(1, 2))).mean(-1)
        return self.head(torch.relu(self.hidden(self.norm(x))))


def mlp() -> nn.Sequential:
    """make.py's model of the same name."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


Made = tuple[Callable[[], nn.Module], Callable[[Any], Any]]
CASES: dict[str, Made] = {
    "adamw": (Mixed, lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.05)),
    "adam": (mlp, lambda p: torch.optim.Adam(p, 0.01)),
    "amsgrad": (mlp, lambda p: torch.optim.Adam(p, 0.01, amsgrad=True)),
    "momentum": (Mixed, lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    "sgd": (mlp, lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (mlp, lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-6)),
    "rmsprop": (mlp, lambda p: fleet.optimizer.RMSProp(0.01, momentum=0.9, centered=True, parameters=p)),
    "adamax": (mlp, lambda p: fleet.optimizer.Adamax(0.01, parameters=p)),
    "lamb": (mlp, lambda p: fleet.optimizer.Lamb(0.01, parameters=p)),
    "static": (mlp, lambda p: torch.optim.Adam(p, 0.5)),  # the file has the rate, 0.01
}
