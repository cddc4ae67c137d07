"""Which predictions count as right."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.examples.scripts import example_module

evaluation = example_module("evaluation")


def test_a_hit_is_among_the_k_largest() -> None:
    logits = torch.tensor([[0.1, 0.9, 0.5, 0.0], [0.1, 0.9, 0.5, 0.0], [4.0, 3.0, 2.0, 1.0]])
    labels = torch.tensor([1, 2, 3])
    assert evaluation.hits_at(logits, labels, 1).tolist() == [True, False, False]
    assert evaluation.hits_at(logits, labels, 2).tolist() == [True, True, False]
    assert evaluation.hits_at(logits, labels, 5).tolist() == [True, True, True]


def test_hits_come_in_the_order_of_the_images_and_without_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9))
    images = torch.tensor([[2.0, 1.0], [1.0, 2.0], [5.0, 1.0], [0.0, 3.0], [9.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 1, 1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader = DataLoader(TensorDataset(images, labels), batch_size=2)
    assert evaluation.find_hits(model, loader, torch.device("cpu")).tolist() == [1, 0, 1, 1, 0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
