"""Which predictions are right."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader


def hits_at(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Returns, per row of ``logits`` (batch, num_classes), whether the label is among the ``k`` largest; bool (batch,).

    With fewer than ``k`` classes every row is a hit.
    """
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == labels.unsqueeze(1)).any(dim=1)


@torch.no_grad()
def find_hits(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], device: torch.device) -> NDArray[np.float64]:
    """Returns 1.0 for each image of ``loader`` that the model classifies correctly and 0.0 for the rest, in order."""
    model.eval()
    hits = [hits_at(model(images.to(device)), labels.to(device), 1) for images, labels in loader]
    return torch.cat(hits).double().cpu().numpy()
