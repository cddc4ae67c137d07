"""data_parallel: buckets as Fleet describes them, the scale of the sum, unused parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.strategies._exchange import data_parallel_in
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


def test_fp16_allreduce_composes_with_the_scale() -> None:
    """A.1 fp16_allreduce: the numbers are those of float16, whatever the scale; 1/3-like values lose digits."""
    options = {"fp16_allreduce": True, "gradient_scale_configs": {"scale_strategy": "sum"}}
    for result in run_workers(gradients, 2, options, backend=None):
        torch.testing.assert_close(result, torch.full((2, 4), 3.0), atol=0, rtol=0)


def fp16_gradient(rank: int, world_size: int, dtype: str, levels: int) -> torch.Tensor:
    """Returns the exchanged gradient of a weight whose local gradients are not float16 numbers."""
    strategy = fleet.DistributedStrategy()
    strategy.fp16_allreduce = True
    strategy.fp16_allreduce_configs = {"dtype": dtype}
    strategy.use_hierarchical_allreduce = levels > 1
    strategy.hierarchical_allreduce_inter_nranks = levels
    fleet.init(is_collective=True, strategy=strategy)
    layer = nn.Linear(3, 1, bias=False)
    model = fleet.distributed_model(layer)
    model(torch.tensor([[1 / 3, 0.1, 2049.0 + rank]])).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp16_allreduce_rounds(dtype: str) -> None:
    """A.1 fp16_allreduce: cast, divide, sum in the narrow type, cast back; the gradient stays float32."""
    narrow = getattr(torch, dtype)
    local = [torch.tensor([[1 / 3, 0.1, 2049.0 + rank]]).to(narrow) for rank in range(2)]
    expected = (local[0] / 2 + local[1] / 2).float()
    for result in run_workers(fp16_gradient, 2, dtype, 1, backend=None):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, atol=0, rtol=0)


def test_hierarchical_allreduce_on_two_levels() -> None:
    """A.1 use_hierarchical_allreduce: 4 workers in groups of 2 get the mean over all, also in float16."""
    results = run_workers(fp16_gradient, 4, "float16", 2, backend=None)
    for result in results:
        torch.testing.assert_close(result, torch.tensor([[1 / 3, 0.1, 2050.5]]), atol=1.0, rtol=1e-3)
        torch.testing.assert_close(result, results[0], atol=0, rtol=0)


def hierarchical_sums(rank: int, world_size: int) -> list[float]:
    """Returns what the two levels add up, and how many groups this worker sends to."""
    from fleet.strategies.use_hierarchical_allreduce import TwoLevels

    levels = TwoLevels(rank, world_size, 2)
    calls: list[str] = []
    for name in ("reduce", "all_reduce", "broadcast"):
        real = getattr(torch.distributed, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _real(*args, **kwargs)

        setattr(torch.distributed, name, counted)
    tensor = torch.tensor([float(rank + 1)])
    levels.sum(tensor).wait()
    return [tensor.item(), float(calls.count("all_reduce"))]


def test_only_leaders_talk_between_groups() -> None:
    """A.1 use_hierarchical_allreduce: the sum is right, and one worker of each group talks to the other group."""
    assert run_workers(hierarchical_sums, 4) == [[10.0, 1.0], [10.0, 0.0], [10.0, 1.0], [10.0, 0.0]]


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
