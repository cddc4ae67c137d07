"""data_parallel: buckets as Fleet describes them, the scale of the sum, unused parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.strategies._gradients.gradient_exchange import data_parallel_in
from fleet.strategies.data_parallel import plan_bucket_caps_MiB
from tests.helpers.workers import WorkerError, run_workers

MIB = 1 << 20


def simulate(sizes: list[int], caps: list[float]) -> list[int]:
    """Returns the bytes of each bucket in backward order, by the reducer's rule: a bucket closes at its cap."""
    buckets, filled, place = [], 0, 0
    for size in reversed(sizes):
        filled += size
        if filled >= int(caps[min(place, len(caps) - 1)] * MIB):
            buckets.append(filled)
            filled, place = 0, place + 1
    return buckets + ([filled] if filled else [])


@pytest.mark.parametrize(
    ("sizes", "bucket", "last", "expected"),
    [
        ([MIB // 2] * 10, 2, 1.0, [2 * MIB, 2 * MIB, MIB]),
        ([MIB // 2] * 3, 32, 1.0, [MIB // 2, MIB]),
        ([4 * MIB, 4, 4], 32, 1.0, [8, 4 * MIB]),  # the first parameter alone is larger than the last bucket
        ([100], 32, 1.0, [100]),
        ([3 * MIB, 1, 1, 40 * MIB], 32, 4.0, [40 * MIB, 3 * MIB + 2]),
    ],
)
def test_bucket_plan(sizes: list[int], bucket: float, last: float, expected: list[int]) -> None:
    """A.1 fuse_grad_size_in_MB, last_comm_group_size_MB: the bucket sent last is small, the others fill up."""
    assert simulate(sizes, plan_bucket_caps_MiB(sizes, bucket, last)) == expected


def net(width: int = 300) -> nn.Sequential:
    """Returns five layers of width x width float32 (352 KiB each with bias) under a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))


def bucket_sizes(rank: int, world_size: int, options: dict[str, Any]) -> list[int]:
    """Returns the bytes of each exchanged bucket in the third step (torch orders them after the first)."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(net())
    module = data_parallel_in(model._chain)
    assert module is not None
    sizes: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        sizes.append(bucket.buffer().numel() * 4)
        future = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    module.register_comm_hook(None, hook)
    for _ in range(3):
        sizes.clear()
        model(torch.ones(2, 300)).sum().backward()
    return sizes


def test_buckets_follow_the_options() -> None:
    """A.1: fuse_grad_size_in_MB bounds the buckets, False fuses nothing."""
    layer = 300 * 300 * 4 + 300 * 4
    fused = run_workers(bucket_sizes, 2, {"fuse_grad_size_in_MB": 1}, backend=None)[0]
    assert sum(fused) == 5 * layer
    assert fused[-1] <= MIB
    assert all(size < MIB + layer for size in fused)
    assert 2 <= len(fused) < 5
    single = run_workers(bucket_sizes, 2, {"fuse_all_reduce_ops": False}, backend=None)[0]
    assert sorted(single) == sorted([300 * 300 * 4, 300 * 4] * 5)


def gradients(rank: int, world_size: int, options: dict[str, Any]) -> torch.Tensor:
    """Returns the gradient of a linear layer whose input is rank + 1."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy)
    layer = nn.Linear(4, 2, bias=False)
    model = fleet.distributed_model(layer)
    model(torch.full((1, 4), float(rank + 1))).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize(("scale", "expected"), [("avg", 1.5), ("sum", 3.0), ("customized", 3.0)])
def test_gradient_scale(scale: str, expected: float) -> None:
    """A.1 gradient_scale_configs: avg divides the sum by the workers, sum and customized leave it."""
    for result in run_workers(gradients, 2, {"gradient_scale_configs": {"scale_strategy": scale}}, backend=None):
        torch.testing.assert_close(result, torch.full((2, 4), expected), atol=0, rtol=0)


class Partial(nn.Module):
    """One of two layers takes part, and which one differs by rank."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.layers, self.used = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)]), used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[self.used](x)


def train_partial(rank: int, world_size: int, find_unused: bool) -> float:
    """Trains two steps with a parameter that takes no part."""
    strategy = fleet.DistributedStrategy()
    strategy.find_unused_parameters = find_unused
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(Partial(rank))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    gradient = model.module.layers[0].weight.grad
    assert gradient is not None
    return float(gradient.sum())


def test_unused_parameters() -> None:
    """A.1 find_unused_parameters: needed when parameters take no part, and then each rank adds what it has."""
    assert run_workers(train_partial, 2, True, backend=None) == [2.0, 2.0]
    with pytest.raises(WorkerError, match="find_unused_parameters"):
        run_workers(train_partial, 2, False, backend=None)


def frozen(rank: int, world_size: int) -> bool:
    """Wraps a model in which nothing learns."""
    fleet.init(is_collective=True)
    layer = nn.Linear(2, 2).requires_grad_(False)
    return bool(fleet.distributed_model(layer)(torch.ones(1, 2)).requires_grad)


def test_frozen_model_is_left_alone() -> None:
    """A model without trainable parameters has nothing to exchange and runs."""
    assert run_workers(frozen, 2, backend=None) == [False, False]


def accumulate_sums(rank: int, world_size: int) -> float:
    strategy = fleet.DistributedStrategy()
    strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    fleet.init(is_collective=True, strategy=strategy)
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 1.0))
    model = fleet.distributed_model(net)
    x = torch.full((1, 1), 1.0 + rank)
    for _ in range(2):
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()
    return float(net.weight.detach())


def test_a_sum_is_not_summed_again() -> None:
    """Issue 9: with no_sync() and without it, a sum over several passes is that of all workers' gradients."""
    assert run_workers(accumulate_sums, 2, backend=None) == [-24.0, -24.0]  # eight passes of 1 and eight of 2
