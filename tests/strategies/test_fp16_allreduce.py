"""fp16_allreduce: narrow numbers on the wire, and float32 gradients behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from tests.helpers.workers import run_workers


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


def summed(rank: int, world_size: int, options: dict[str, Any]) -> torch.Tensor:
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


def test_fp16_allreduce_composes_with_the_scale() -> None:
    """A.1 fp16_allreduce: the numbers are those of float16, whatever the scale; 1/3-like values lose digits."""
    options = {"fp16_allreduce": True, "gradient_scale_configs": {"scale_strategy": "sum"}}
    for result in run_workers(summed, 2, options, backend=None):
        torch.testing.assert_close(result, torch.full((2, 4), 3.0), atol=0, rtol=0)
