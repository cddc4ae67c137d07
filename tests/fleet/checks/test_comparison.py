"""Checksums of what workers hold."""

from __future__ import annotations

import torch

from fleet.checks.comparison import checksums, digest, first_difference, listed_ranks


def test_checksums_are_of_bits() -> None:
    kinds = (torch.float32, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)
    tensors = {str(kind): torch.ones(3, 2).to(kind) for kind in kinds}
    assert checksums(tensors) == checksums({name: tensor.T.clone() for name, tensor in tensors.items()})
    changed = {**tensors, "torch.float16": torch.full((3, 2), 1.001, dtype=torch.float16)}
    assert first_difference([checksums(tensors), checksums(changed)]) == "torch.float16"
    assert checksums({"nan": torch.tensor([float("nan")])}) == checksums({"nan": torch.tensor([float("nan")])})
    assert checksums({"none": torch.empty(0), "number": torch.tensor(1.0)})["none"] == 0
    assert checksums({}) == {}


def test_words() -> None:
    assert digest({"a": 1}) == digest({"a": 1}) != digest({"a": 2})
    assert first_difference([{"a": 1}, {"a": 1}]) == ""
    assert first_difference([{"a": 1}, {}]) == "a"
    assert [listed_ranks([1]), listed_ranks([1, 2])] == ["worker 1", "workers 1, 2"]
