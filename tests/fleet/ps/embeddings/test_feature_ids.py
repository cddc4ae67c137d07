"""The forms in which a collection takes the ids of its features."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fleet
from fleet.errors import ConfigError
from tests.fleet.ps.embeddings.features import BIG, Keyed, both, compare

JAGGED = [[1, 2, 2], [], [BIG]]
FLAT = (torch.tensor([1, 2, 2, BIG]), torch.tensor([0, 3, 3]))


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in JAGGED], layout=layout)


class Jagged:
    """The methods of TorchRec's JaggedTensor that are needed."""

    def values(self) -> Tensor:
        return FLAT[0]

    def offsets(self) -> Tensor:
        return torch.tensor([0, 3, 3, 4])


class Weighted(Jagged):
    """One with weights."""

    def weights_or_none(self) -> Tensor:
        return torch.ones(4)


FORMS: dict[str, Callable[[], Any]] = {
    "lists": lambda: JAGGED,
    "pair": lambda: FLAT,
    "jagged": lambda: nested(torch.jagged),
    "nested": lambda: nested(torch.strided),
    "with holes": lambda: torch.nested.narrow(
        torch.tensor([[1, 2, 2], [5, 5, 5], [BIG, 5, 5]]), 1, 0, torch.tensor([3, 0, 1]), layout=torch.jagged
    ),
    "JaggedTensor": Jagged,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("form", FORMS)
def test_ids_of_several_lengths_in_every_form(form: str) -> None:
    made, alone = both()
    compare(made, alone, {"tags": FORMS[form](), "words": JAGGED}, {"tags": FLAT, "words": (JAGGED,)})


def test_jagged_ids_without_a_combiner_give_the_rows_one_after_the_other() -> None:
    made, alone = both()
    lists = [torch.tensor([1, 2]), torch.tensor([3])]
    compare(made, alone, {"user": lists})
    assert made({"user": lists})["user"].shape == (3, 4)


def test_weights_of_one_feature_are_refused() -> None:
    """A combiner would leave them out of the sum."""
    made = fleet.SparseEmbeddings({"tags": {"dim": 4, "combiner": "sum"}})
    with pytest.raises(ConfigError, match="received a Weighted with weights"):
        made({"tags": Weighted()})
    with pytest.raises(ConfigError, match="received a Weighted with weights"):
        made["tags"](Weighted())


def test_a_keyed_jagged_tensor() -> None:
    made, alone = both()
    parts = {"tags": JAGGED, "words": [[0, 1], [2], []], "user": [[7], [8], [7]]}
    expected = {name: (parts[name],) for name in ("user", "words", "tags")}
    compare(made, alone, Keyed(parts), expected)
    del expected["user"]
    compare(made, alone, Keyed({"tags": JAGGED, "words": [[1]]}), {**expected, "words": ([[1]],)})
    without_strides = SimpleNamespace(
        **{name: getattr(Keyed(parts), name) for name in ("keys", "values", "lengths", "offset_per_key")}
    )
    compare(made, alone, without_strides, {name: (bags,) for name, bags in sorted(parts.items(), reverse=True)})
