"""The forms of data that train_batch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.strategies.pipeline.micro_batches import PipelineDatasetPreprocessor, cut_data, plan_weights

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


def sizes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape[0]
    if isinstance(value, dict):
        return {key: sizes(item) for key, item in value.items()}
    return type(value)(sizes(item) for item in value) if isinstance(value, tuple | list) else value


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        (X, [2, 2, 2]),
        (X[:5], [2, 2, 1]),
        (Y, [2, 2, 2]),
        ((X, Y), [(2, 2)] * 3),
        ({"x": X, "factor": 3}, [{"x": 2, "factor": 3}] * 3),
        ([X, X[:1]], [6, 1]),
        ((list(X.split(2)), Y), [(2, 2)] * 3),
    ],
)
def test_inputs_are_cut(inputs: Any, found: Any) -> None:
    """Section 7.1, data: tensors (also of one dimension, P8), tuples, dictionaries, lists of micro-batches."""
    got, labels = cut_data((inputs, None), 3, 2, inputs=True, labels=False)
    assert got is not None
    assert [sizes(value) for value in got] == found
    assert labels is None


def test_iterators_give_micro_batches() -> None:
    """Section 7.1: an iterator of pairs, as many as a step has; a preprocessor; who needs data."""
    stream = iter([(X, Y)] * 5)
    inputs, labels = cut_data(stream, 3, 2, inputs=True, labels=True)
    assert (len(inputs or []), len(labels or [])) == (3, 3)
    inputs, _ = cut_data(PipelineDatasetPreprocessor(lambda: stream), 3, 2, inputs=True, labels=False)
    assert len(inputs or []) == 2
    with pytest.raises(ValueError, match="at its end"):
        cut_data(stream, 3, 2, inputs=True, labels=False)
    assert cut_data(None, 3, 2, inputs=False, labels=False) == (None, None)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (None, "the first and the last stage need it"),
        ((X,), "tuple of 1"),
        (X, r"\(inputs, labels\)"),
        ([(X, Y)] * 3, "list of 3"),
        ((torch.zeros(7, 1), Y), "7 rows, and a step takes at most"),
        ((torch.tensor(1.0), Y), "without rows"),
        ((X, Y[:3]), "3 micro-batches and the labels 2"),
        (([X] * 4, Y), "has 4 micro-batches"),
        (((X, Y[:3]), Y), "different numbers"),
        (iter([X]), "the iterator gave Tensor"),
    ],
)
def test_wrong_data_is_explained(data: Any, rule: str) -> None:
    """Section 7.1: what train_batch takes, said where it got something else."""
    with pytest.raises(ValueError, match=rule):
        cut_data(data, 3, 2, inputs=True, labels=True)


def test_losses_weigh_as_their_rows() -> None:
    """Study 3, gradients scaled wrong: the sum of weighted means is the mean of the whole batch."""
    assert plan_weights([X, X, X[:3]]) == [0.4, 0.4, 0.2]
    assert plan_weights([{"a": X}, {"a": X}]) == [0.5, 0.5]
    assert plan_weights([None, None, None, None]) == [0.25] * 4
