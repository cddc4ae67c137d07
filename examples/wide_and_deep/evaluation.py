"""How well predictions rank the samples."""

from __future__ import annotations

import torch
from data import Batch
from torch import nn
from torch.utils.data import DataLoader

try:
    from sklearn.metrics import roc_auc_score
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: the examples need `pip install '.[examples]'`, run in the clone.") from None


@torch.no_grad()
def find_auc(model: nn.Module, loader: DataLoader[Batch], device: torch.device) -> float:
    """Returns the area under the ROC curve: how often a late flight (a click) has the higher score of a random pair.

    Raises:
        ValueError: all labels of the loader are the same.
    """
    model.eval()
    scores, labels = [], []
    for ids, dense, label in loader:
        scores.append(model(ids.to(device), dense.to(device)).cpu())
        labels.append(label)
    truth = torch.cat(labels).numpy()
    if truth.min() == truth.max():
        raise ValueError(f"The {len(truth)} test samples all have label {truth[0]:g}; AUC needs both.")
    return float(roc_auc_score(truth, torch.cat(scores).numpy()))
