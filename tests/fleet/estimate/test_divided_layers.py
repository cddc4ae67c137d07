"""Layers that are made for an estimate are parts, and what they exchange goes nowhere."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fleet.estimate.divided_layers import divided_layers
from fleet.strategies.tensor_parallel import regions
from fleet.strategies.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fleet.strategies.tensor_parallel.place import CurrentJob


def test_parts_without_workers() -> None:
    """Shapes are those of a worker of mp 4; afterwards layers are whole, and torch's functions are back."""
    before = regions.dist
    with divided_layers({"mp": 4, "dp": 2}), FakeTensorMode():
        up, down = ColumnParallelLinear(8, 16), RowParallelLinear(16, 8)
        x = torch.empty(2, 8, requires_grad=True)
        down(up(x)).sum().backward()
    assert up.weight.shape == (4, 8)
    assert down.weight.shape == (8, 4)
    assert down.weight.grad is not None
    assert down.weight.grad.shape == (8, 4)
    assert x.grad is not None
    assert regions.dist is before
    assert CurrentJob.axes is None
    assert ColumnParallelLinear(8, 16).weight.shape == (16, 8)
