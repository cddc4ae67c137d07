"""The handwritten digits that come with scikit-learn, and a small network for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: the examples need `pip install '.[examples]'`, run in the clone.") from None

NUM_TRAIN = 1437  # of 1,797; the other 360 are for the test


def open_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test data: float images [64], and labels from 0 to 9."""
    raw: Any = load_digits()
    images, labels = torch.from_numpy(raw.data).float() / 16, torch.from_numpy(raw.target)
    return TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN]), TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:])


def share(data: TensorDataset, batch_size: int, *, train: bool) -> DataLoader[Any]:
    """Returns this worker's rows, in batches that hold ``batch_size`` rows of all workers together."""
    replicas, rank = fleet.data_replicas(), fleet.data_rank()
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, rank, shuffle=train)
    return DataLoader(data, batch_size=batch_size // replicas, sampler=sampler, drop_last=train)


def network() -> nn.Module:
    """Returns a network of one hidden layer."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
