"""The places at which a batch may have the ids of a lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fleet.ps.embeddings.id_places import IdPlace, places_of, tensors_of
from fleet.ps.embeddings.jagged_ids import JaggedIds
from tests.fleet.ps.embeddings.features import Keyed
from tests.fleet.ps.embeddings.test_feature_ids import FLAT, FORMS

OTHER = torch.arange(4, dtype=torch.float32)[None]  # never ids of these tests


@dataclass
class Batch:
    """As TorchRec's, whose features are in an attribute."""

    dense: Tensor
    sparse: Any


def values_at(place: IdPlace, batch: Any) -> list[int] | None:
    found = place.read(batch, {})
    if found is None:
        return None
    return (found.values if isinstance(found, JaggedIds) else found).tolist()


BATCHES: dict[str, Any] = {
    "jagged": lambda: {"x": OTHER, "tags": FORMS["jagged"]()},
    "nested": lambda: {"x": OTHER, "tags": FORMS["nested"]()},
    "with holes": lambda: (OTHER, [FORMS["with holes"]()]),
    "JaggedTensor": lambda: {"x": OTHER, "tags": FORMS["JaggedTensor"]()},
    "pair": lambda: {"x": OTHER, "tags": FLAT},
    "KeyedJaggedTensor": lambda: Batch(OTHER, Keyed({"user": [[5]], "tags": [[1, 2, 2], [], [10**15]]})),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", BATCHES)
def test_jagged_ids_are_read_where_they_were_found(form: str) -> None:
    batch = BATCHES[form]()
    place = next(place for place in places_of(batch, 4) if values_at(place, batch) == FLAT[0].tolist())
    assert values_at(place, BATCHES[form]()) == FLAT[0].tolist()
    assert [tensor.tolist() for tensor in tensors_of(batch).values()].count(FLAT[0].tolist()) >= 1
    # A batch of another form has none there.
    for other in (None, {"tags": None}, [torch.tensor([1])], (1, [2]), Batch(OTHER, None), Keyed({"b": [[1]]})):
        assert place.read(other, {}) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", BATCHES)
def test_jagged_ids_come_with_their_starts(form: str) -> None:
    batch = BATCHES[form]()
    found = [place.read(batch, {}) for place in places_of(batch, 4)]
    starts = [one.starts().tolist() for one in found if isinstance(one, JaggedIds)]
    assert FLAT[1].tolist() in starts


def test_features_are_found_by_name_whatever_their_order() -> None:
    first = Keyed({"user": [[5], [6]], "tags": [[1, 2], [3]]})
    (place,) = [place for place in places_of(first, 3) if values_at(place, first) == [1, 2, 3]]
    assert values_at(place, Keyed({"tags": [[4], []], "user": [[5], [6]]})) == [4]
    assert place.read(Keyed({"user": [[5], [6]]}), {}) is None


def test_values_that_are_no_ids_are_left_out() -> None:
    weights = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged, requires_grad=True)
    assert places_of({"weights": weights, "class": Batch, "text": "ids"}, 1) == []


def test_columns_of_a_tensor() -> None:
    batch = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = [values_at(place, batch) for place in places_of(batch, 4)]
    assert found == [[[1, 2, 3], [4, 5, 6]], [[1, 2], [4, 5]], [[2, 3], [5, 6]]]
    assert IdPlace((), 1, 2, 2).read(batch, {}) is None
