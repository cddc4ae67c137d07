"""Jagged ids of torch and TorchRec as values and starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleet.ps.embeddings.jagged_ids import KeyedIds, features_of, ids_of_feature, jagged_ids
from tests.fleet.ps.embeddings.features import Keyed
from tests.fleet.ps.embeddings.test_feature_ids import FLAT, FORMS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", ["jagged", "nested", "with holes", "JaggedTensor"])
def test_values_and_starts(form: str) -> None:
    found = jagged_ids(FORMS[form]())
    assert found is not None
    assert torch.equal(found.values, FLAT[0])
    assert torch.equal(found.starts(), FLAT[1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_samples() -> None:
    found = jagged_ids(torch.nested.nested_tensor([], dtype=torch.int64))
    assert found is not None
    assert (found.values.tolist(), found.starts().tolist()) == ([], [])
    assert found.values.dtype is torch.int64


@pytest.mark.parametrize("value", [torch.tensor([1]), [1], (1, 2), SimpleNamespace(values=1, offsets=2), None, "ids"])
def test_anything_else_has_none(value: Any) -> None:
    assert jagged_ids(value) is None


@pytest.mark.parametrize("has_strides", [True, False])
def test_the_features_of_a_keyed_jagged_tensor(has_strides: bool) -> None:
    keyed: Any = Keyed({"tags": [[1, 2], []], "user": [[7], [8]]})
    if not has_strides:
        names = ("keys", "values", "lengths", "offset_per_key")
        keyed = SimpleNamespace(**{name: getattr(keyed, name) for name in names})
    assert isinstance(keyed, KeyedIds)
    found = {name: (ids.values.tolist(), ids.starts().tolist()) for name, ids in features_of(keyed).items()}
    assert found == {"tags": ([1, 2], [0, 2]), "user": ([7, 8], [0, 1])}
    assert ids_of_feature(keyed, "nobody") is None
    one = ids_of_feature(keyed, "user")
    assert one is not None
    assert one.values.tolist() == [7, 8]


def test_features_of_different_numbers_of_samples() -> None:
    keyed = Keyed({"tags": [[1, 2], [], [3]], "user": [[7]]})
    found = {name: ids.starts().tolist() for name, ids in features_of(keyed).items()}
    assert found == {"tags": [0, 2, 2], "user": [0]}
