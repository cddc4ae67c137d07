"""The exchange of a stage's gradients among its copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleet.strategies.pipeline.reducer import GradientReducer
from tests.helpers.workers import run_workers


def nothing() -> None:
    """Sums no ties."""


def exchanges(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    x = torch.full((3, 2), 1.0 + rank)
    for overlaps in (False, True):
        reducer = GradientReducer([list(layers.parameters())], group, divisor=2, bucket_bytes=30, overlaps=overlaps)
        reducer.begin()
        layers(x).sum().backward()  # a micro-batch before the last
        with reducer.last_backward(0):
            layers(x).sum().backward()
            assert len(reducer._started) == (2 if overlaps else 0)  # in step with backward, not after it
        reducer.finish(nothing, dict)
        found = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        for p in layers.parameters():
            p.grad = None
        for other in (1.0, 2.0):
            layers(torch.full((3, 2), other)).sum().backward()
        for p, grad in zip(layers.parameters(), found, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(grad, p.grad)  # two passes of each worker, divided by two
            p.grad = None

    earlier_steps_and_unused(rank, layers)


def earlier_steps_and_unused(rank: int, layers: nn.Sequential) -> None:
    group = dist.group.WORLD
    # Gradients of an earlier step stay as they were and are added once.
    reducer = GradientReducer([list(layers.parameters())], group, divisor=1)
    weight = layers[0].weight
    weight.grad = torch.ones_like(weight)
    reducer.begin()
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    reducer.finish(nothing, dict)
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert torch.equal(layers[2].weight.grad, torch.full_like(layers[2].weight, 2.0))

    # The same parameter without a gradient on every worker: refused by name, or left alone.
    for p in layers.parameters():
        p.grad = None
    strict = GradientReducer([list(layers.parameters())], group)
    strict.begin()
    with pytest.raises(ValueError, match=r"'bias' took no part.*find_unused_parameters"):
        strict.finish(nothing, lambda: {p: "bias" for p in layers.parameters()})
    loose = GradientReducer([list(layers.parameters())], group, finds_unused=True)
    loose.begin()
    if rank == 1:
        weight.grad = torch.ones_like(weight)
    loose.finish(nothing, dict)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert layers[1].weight.grad is None

    # Float16 on the wire loses small values unless a factor lifts them.
    for factor, kept in ((1.0, False), (4096.0, True)):
        narrow = GradientReducer([[weight]], group, divisor=1)
        narrow.wire_dtype, narrow.wire_factor = torch.float16, lambda factor=factor: factor
        weight.grad = None
        narrow.begin()
        weight.grad = torch.full_like(weight, 1e-8)
        narrow.finish(nothing, dict)
        assert bool((weight.grad > 0).all()) is kept


def test_gradients_are_exchanged_once() -> None:
    """Section 7.5 and study 4: overlapped and not, divided, over several steps, unused, as float16."""
    run_workers(exchanges, 2, timeout_s=60)
