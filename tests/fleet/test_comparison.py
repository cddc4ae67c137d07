"""What workers say about a subject, and checksums of what they hold."""

from __future__ import annotations

import time

import torch

from fleet._comparison import Comparison, checksums, digest, first_difference, listed_ranks
from tests.helpers.workers import run_workers


def compare(rank: int, world_size: int) -> list[object]:
    comparison = Comparison(rank, world_size)
    found: list[object] = [comparison.gather("both", rank, 20.0), comparison.gather("both", [rank], 20.0)]
    if rank == 0:
        begun = time.monotonic()
        found.append(comparison.gather("one", "here", 0.5))
        assert time.monotonic() - begun < 10
    torch.distributed.barrier()
    return found


def test_workers_hear_each_other_and_an_absent_one_is_none() -> None:
    first, second = run_workers(compare, 2)
    assert first == [[0, 1], [[0], [1]], ["here", None]]
    assert second == [[0, 1], [[0], [1]]]


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
