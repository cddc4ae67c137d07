"""Features of every kind, in a collection and as modules alone, and what must be equal of the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fleet
from fleet.ps.client.shards import Gradient
from fleet.ps.embeddings.lookup import LocalRows
from fleet.ps.table.rules import Rule

START = fleet.ps.Initializer("uniform", -0.5, 0.5)
BIG = 10**15
TABLES: dict[str, Any] = {
    "user": 4,
    "item": 4,
    "wide": {"dim": 2},
    "padded": {"dim": 4, "padding_idx": 0},
    "words": {"dim": 4, "combiner": "mean", "padding_idx": 0},
    "tags": {"dim": 4, "combiner": "mean"},
    "total": {"dim": 4, "combiner": "sum", "num_slots": 2},
    "apart": {"dim": 4, "num_slots": 2, "separate_slots": True},
    "pair": {"dim": 4, "name": "ids"},
    "again": {"dim": 4, "name": "ids"},
}


class Trained(LocalRows):
    """Local rows whose gradients are wanted."""

    trains = True


class Keyed:
    """The methods of TorchRec's KeyedJaggedTensor that are needed."""

    def __init__(self, parts: Mapping[str, list[list[int]]], weights: Tensor | None = None) -> None:
        self.parts = parts
        self.weights = weights

    def keys(self) -> list[str]:
        return list(self.parts)

    def values(self) -> Tensor:
        return torch.tensor([one for bags in self.parts.values() for bag in bags for one in bag], dtype=torch.int64)

    def lengths(self) -> Tensor:
        return torch.tensor([len(bag) for bags in self.parts.values() for bag in bags], dtype=torch.int32)

    def offset_per_key(self) -> list[int]:
        return np.cumsum([0, *(sum(map(len, bags)) for bags in self.parts.values())]).tolist()

    def stride_per_key(self) -> list[int]:
        return [len(bags) for bags in self.parts.values()]

    def weights_or_none(self) -> Tensor | None:
        return self.weights


def settings_of(given: int | dict[str, Any]) -> dict[str, Any]:
    return {"initializer": START, **(given if isinstance(given, dict) else {"dim": given})}


def both(tables: Mapping[str, Any] = TABLES) -> tuple[fleet.SparseEmbeddings, dict[str, fleet.SparseEmbedding]]:
    """Returns a collection, and the same modules on their own."""
    made = fleet.SparseEmbeddings(tables, initializer=START)
    alone = {name: fleet.SparseEmbedding(**settings_of(given)) for name, given in tables.items()}
    for module in (*made.children(), *alone.values()):
        module.lookup.source = Trained(module.table_config(Rule("sgd")))
    return made, alone


def draw(*shape: int, seed: int = 0) -> Tensor:
    ids = torch.randint(-(2**62), 2**62, (9,), generator=torch.Generator().manual_seed(1))
    ids[0] = 0
    return ids[torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed))]


def batch(seed: int = 0, size: int = 6) -> dict[str, Any]:
    shapes = {"words": (size, 3), "tags": (size, 2), "total": (size, 2, 3), "apart": (size, 2), "padded": (size, 2)}
    return {name: draw(*shapes.get(name, (size,)), seed=10 * seed + place) for place, name in enumerate(TABLES)}


def is_equal(one: Gradient | None, other: Gradient | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("ids", "rows", "shows", "clicks", "slots")]
    return all(a is b if a is None or b is None else a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def compare(
    made: fleet.SparseEmbeddings,
    alone: Mapping[str, fleet.SparseEmbedding],
    ids: Any,
    arguments: Mapping[str, tuple[Any, ...]] | None = None,
    **counts: Any,
) -> None:
    """Asserts that outputs and gradients are the same bits."""
    found = made(ids, **counts)
    arguments = {name: (ids[name],) for name in ids} if arguments is None else arguments
    expected = {}
    for name, own in arguments.items():
        keeps = {label: value for label, value in counts.items() if alone[name].keeps_counts}
        expected[name] = alone[name](*own, **keeps)
    assert list(found) == [name for name in alone if name in arguments]
    for name, rows in expected.items():
        assert found[name].shape == rows.shape, name
        assert torch.equal(found[name], rows), name
    for results in (found, expected):
        factors = {name: torch.sin(torch.arange(rows.numel()) + len(name)) for name, rows in results.items()}
        total = sum((rows.flatten() * factors[name]).sum() for name, rows in sorted(results.items()))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
    for name in alone:
        assert is_equal(made[name].lookup.take(), alone[name].lookup.take()), name
