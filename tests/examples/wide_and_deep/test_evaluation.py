"""The area under the ROC curve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, TensorDataset

from tests.examples.wide_and_deep.example import example_module

evaluation = example_module("evaluation")
data = example_module("data")
CPU = torch.device("cpu")


class FirstNumber(nn.Module):
    """Says what the first dense number is."""

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return dense[:, 0]


def loader(scores: list[float], labels: list[float]) -> object:
    dataset = TensorDataset(torch.zeros(len(scores), 1), torch.tensor(scores)[:, None], torch.tensor(labels))
    return data.batches_of(dataset, SequentialSampler(dataset), 2, drop_last=False)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 40).astype(float), rng.integers(0, 2, 40).astype(float)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels == 1] for b in scores[labels == 0]]
    found = evaluation.find_auc(FirstNumber(), loader(scores.tolist(), labels.tolist()), CPU)
    assert found == pytest.approx(np.mean(pairs))


def test_one_kind_of_label_is_refused() -> None:
    with pytest.raises(ValueError, match="3 test samples all have label 1"):
        evaluation.find_auc(FirstNumber(), loader([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), CPU)
