"""Trainers of a hybrid job as a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleet.errors import PSError
from fleet.ps.worker.trainer_group import ProcessGroupTrainers
from tests.helpers.workers import run_workers


def exchange(rank: int, world_size: int) -> Any:
    """Sums and copies; then trainer 1 is gone, without a word."""
    group = dist.group.WORLD
    assert group is not None
    trainers = ProcessGroupTrainers(group)
    total, copied = torch.full((3,), float(rank + 1)), torch.full((2,), rank + 5)
    trainers.start_sum(total)()
    trainers.copy_from_0(copied)
    if rank == 0:
        message = ""
        try:
            trainers.start_sum(torch.ones(1))()
        except PSError as error:
            message = str(error)
        dist.destroy_process_group()
        return total, copied, message
    dist.destroy_process_group()  # its connections end
    return total, copied, ""


def test_sum_copy_and_a_trainer_that_is_gone() -> None:
    """D.7: one sum everywhere; who waits for a trainer that is gone gets an error that says what to do."""
    first, second = run_workers(exchange, 2)
    for total, copied, _ in (first, second):
        assert total.tolist() == [3, 3, 3]
        assert copied.tolist() == [5, 5]
    assert "restart all of them" in first[2]


@pytest.mark.gpu
def test_sum_on_a_gpu() -> None:
    """003-21: NCCL sums tensors of the GPU; one process, as one GPU takes one rank."""
    assert run_workers(sum_on_gpu, 1, backend="cpu:gloo,cuda:nccl") == [[2.0, 2.0]]


def sum_on_gpu(rank: int, world_size: int) -> Any:
    """Sums on the first GPU."""
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.full((2,), 2.0, device="cuda")
    ProcessGroupTrainers(group).start_sum(tensor)()
    return tensor.tolist()
