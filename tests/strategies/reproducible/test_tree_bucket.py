"""TreeBucket: the sums of a bucket over processes, which do not depend on their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies.reproducible.tree_bucket import TreeBucket
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import summed

NUMS = range(1, 10)
AGREED = 1020


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns parameters in several layouts."""
    return [
        torch.zeros(3, 2, dtype=dtype),
        torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last),
        torch.zeros(4, 6, dtype=dtype)[:, ::2],
        torch.zeros(5, dtype=dtype),
        torch.zeros((), dtype=dtype),
        torch.zeros(7, dtype=dtype),  # nobody uses it
    ]


def gradients(like: list[Tensor], rank: int, round_: int = 0) -> dict[int, Tensor]:
    """Returns a logical worker's gradients by place; the fourth parameter is used by ranks that three divides."""
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    found = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in like[:-1]]
    return {place: g for place, g in enumerate(found) if place != 3 or rank % 3 == 0}


def expected(like: list[Tensor], num: int, round_: int = 0) -> list[Tensor]:
    """Returns the sums in the order of the tree."""
    found = [gradients(like, rank, round_) for rank in range(num)]
    return [summed([each.get(p, torch.zeros_like(like[p])) for each in found]) for p in range(len(like) - 1)]


def run_round(bucket: TreeBucket, logical: LogicalWorkers, round_: int = 0, passes: int = 1) -> None:
    """Adds the gradients of this process's turns, and sends them in the last one."""
    for rank in logical.ranks:
        found = {bucket.parameters[p]: g for p, g in gradients(bucket.parameters, rank, round_).items()}
        if rank != logical.ranks[-1]:
            bucket.add(rank, found, AGREED)
            continue
        for _ in range(passes):
            bucket.send(rank, found, AGREED, 0)
            bucket.reduce()


def exchanged(rank: int, world_size: int, name: str) -> list[Any]:
    """Returns the sums for each number of logical workers, of one round and of two."""
    results: list[Any] = []
    group = dist.group.WORLD if world_size > 1 else None
    for num in NUMS:
        if num < world_size:
            continue
        logical = LogicalWorkers(num, world_size, rank, rounds_per_update=2)
        bucket = TreeBucket(parameters(getattr(torch, name)), logical, group)
        run_round(bucket, logical, passes=2)  # a second pass of the last turn takes the place of the first
        bucket.keep()
        bucket.clear()
        run_round(bucket, logical, round_=1)
        bucket.gather(1)
        two = bucket.finish()
        bucket.drop_merged()
        bucket.clear()
        run_round(bucket, logical)
        bucket.gather(num)
        one = bucket.finish()
        sums = [[[found.get(p) for p in bucket.parameters], agreed] for found, agreed in (one, two)]
        results.append([num, *sums])
    return results


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_the_sum_is_that_of_the_tree(processes: int, name: str) -> None:
    """Acceptance 4: another order of the tree fails here."""
    like = parameters(getattr(torch, name))
    for found in run_workers(exchanged, processes, name):
        assert [num for num, *_ in found] == [num for num in NUMS if num >= processes]
        for num, (one, agreed), (two, agreed_twice) in found:
            first, second = expected(like, num), expected(like, num, 1)
            for got, a in zip(one, [*first, None], strict=True):
                assert a is None if got is None else torch.equal(got, a / num), num
            for got, a, b in zip(two, [*first, None], [*second, None], strict=True):
                assert a is None if got is None else torch.equal(got, a + b), num
            if name == "float32":
                assert (round(agreed * num), agreed_twice) == (AGREED * num, 2 * AGREED * num)


def test_gradients_have_the_strides_of_their_parameters() -> None:
    logical = LogicalWorkers(1, 1, 0)
    own = parameters()
    bucket = TreeBucket(own, logical, None)
    run_round(bucket, logical)
    bucket.gather(1)
    found, _ = bucket.finish()
    assert [found[p].stride() == p.stride() for p in own[:-1]] == [True, True, False, True, True]
    assert found[own[2]].is_contiguous()  # a part of a larger tensor


def test_a_process_keeps_few_copies() -> None:
    """Three buffers for 8 logical workers on one process, and one once the sum is complete."""
    logical = LogicalWorkers(8, 1, 0)
    bucket = TreeBucket(parameters(), logical, None)
    most = 0
    for rank in range(7):
        bucket.add(rank, {}, 0)
        most = max(most, len(bucket._stack.sums))
    assert most == 3
