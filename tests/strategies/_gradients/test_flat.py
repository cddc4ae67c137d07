"""Flat collectives: many tensors of several types in few messages, the same on every worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleet.strategies._gradients import flat
from tests.helpers.workers import run_workers


def tensors(rank: int) -> list[torch.Tensor]:
    """Returns tensors of two types, one of them strided, filled with the rank."""
    strided = torch.full((4, 6), float(rank)).t()
    return [torch.full((3,), float(rank)), strided, torch.tensor(rank), torch.full((2, 2), float(rank)).double()]


def exchange(rank: int, world_size: int, chunk_bytes: int) -> dict[str, Any]:
    """Averages and broadcasts; counts the messages."""
    flat._CHUNK_BYTES = chunk_bytes
    calls = [0]
    real = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return real(*args, **kwargs)

    dist.all_reduce = counted
    means = [t for t in tensors(rank + 1) if t.is_floating_point()]
    flat.average(means, dist.group.WORLD)
    dist.all_reduce = real
    sent = tensors(rank + 5)
    flat.broadcast_from_rank_0(sent, dist.group.WORLD)
    return {
        "means": [t.mean().item() for t in means],
        "sent": [float(t.double().mean()) for t in sent],
        "calls": calls[0],
        "shape": tuple(means[1].shape),
    }


@pytest.mark.parametrize(("chunk_bytes", "messages"), [(1 << 20, 2), (1, 3)])
def test_average_and_broadcast(chunk_bytes: int, messages: int) -> None:
    """A.8: the mean over the workers in place; one message per type, more when the buffer is full."""
    for result in run_workers(exchange, 2, chunk_bytes):
        assert result == {"means": [1.5] * 3, "sent": [5.0] * 4, "calls": messages, "shape": (6, 4)}
