"""The process groups of a pipeline's streams."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fleet.job.axes import Axes
from fleet.strategies.pipeline.order import StageStream
from fleet.strategies.pipeline.stage import StreamGroups
from tests.helpers.workers import run_workers


def test_streams_on_gpus_have_groups_of_their_own() -> None:
    """NCCL finishes what a group was asked for in order, so one group for two streams can wait for itself.

    With chunks the last stage sends to the first: from two stages on there are streams both ways around.
    """
    assert run_workers(numbers_of_groups, 2) == [(4, 1)] * 2
    assert run_workers(numbers_of_groups, 3) == [(4, 1)] * 3


def numbers_of_groups(rank: int, world_size: int) -> tuple[int, ...]:
    """Returns in how many groups the four kinds of streams travel on GPUs, and on CPUs, where tags tell them apart."""
    assert dist.group.WORLD is not None
    axes = Axes({"pp": world_size}, rank, {tuple(range(world_size)): dist.group.WORLD})
    last = world_size - 1
    streams = [
        StageStream("f", 0, 1), StageStream("b", 1, 0), StageStream("f", last, 0), StageStream("b", 0, last)
    ]  # fmt: skip
    found = []
    for kind in ("cuda", "cpu"):
        groups = StreamGroups(axes, torch.device(kind))
        found.append(len({id(groups.group_of(stream)) for stream in streams}))
    return tuple(found)
