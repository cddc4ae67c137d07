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


def test_checksums_see_places() -> None:
    """Two values that change places, also beyond one slice, and in halves of a word."""
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.uint8):
        for size in (8, 3_000_001):
            first = torch.zeros(size, dtype=kind)
            first[1], first[-2] = 1, 2
            second = first.clone()
            second[1], second[-2] = 2, 1
            assert checksums({"all": first}) != checksums({"all": second}), (kind, size)
            pair = torch.stack([first, second])
            assert checksums({"all": pair}) != checksums({"all": pair.flip(0)}), (kind, size)


def test_checksums_of_many_are_those_of_each() -> None:
    sizes = (0, 1, 3, 65_536, 700_001)
    tensors = {f"{size} {offset}": torch.arange(size + offset)[offset:].float() for size in sizes for offset in (0, 1)}
    tensors |= {f"{name} odd": t.to(torch.uint8)[1:] for name, t in tensors.items()}
    together = checksums(tensors)
    assert together == {name: checksums({name: tensor})[name] for name, tensor in tensors.items()}
    assert list(together) == list(tensors)


def test_words() -> None:
    assert digest({"a": 1}) == digest({"a": 1}) != digest({"a": 2})
    assert first_difference([{"a": 1}, {"a": 1}]) == ""
    assert first_difference([{"a": 1}, {}]) == "a"
    assert [listed_ranks([1]), listed_ranks([1, 2])] == ["worker 1", "workers 1, 2"]
