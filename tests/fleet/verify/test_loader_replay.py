"""Samples are known by their content, and places by the user's line."""

import torch
from torch.utils.data import Subset, TensorDataset

from fleet.verify.loader_replay import _sample, is_library, rows_of


def test_rows_of_equal_samples_are_equal() -> None:
    x, y = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0])
    rows = rows_of([x, y])
    assert rows[0] == rows[2] != rows[1]


def test_a_sample_of_a_subset_is_that_of_the_data_set() -> None:
    data = TensorDataset(torch.arange(10))
    assert _sample(Subset(Subset(data, [5, 6, 7]), [2, 0]), 0) == 7


def test_torch_is_a_library_and_this_file_is_not() -> None:
    assert is_library(str(torch.__file__))
    assert not is_library(__file__)
