"""Penalties on parts of weights: what is wrong for a part is named, and a sum over elements is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleet import fleet
from fleet.errors import OptionWarning
from fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear
from fleet.strategies._shared.parameter_layout import Layout, set_layout
from fleet.strategies.tensor_parallel.part_penalties import warn_of_penalties
from fleet.strategies.tensor_parallel.regions import applied
from tests.helpers.workers import run_workers

Penalty = Callable[[nn.Module], Any]


class _ReduceLike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def model() -> nn.Module:
    """Returns two layers, of which the first is divided by its output."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for name, shape in (("weight", (8, 3)), ("bias", (8,))):
        set_layout(net[0], name, Layout("mp", 0, 2, 0, shape))
    return net


def said(penalty: Penalty) -> str:
    """Returns what is said of a loss with ``penalty``."""
    net = model()
    loss = F.mse_loss(net(torch.randn(5, 3)), torch.zeros(5, 2)) + penalty(net) * 1e-4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert warn_of_penalties(loss, net) == bool(caught)
    return str(caught[0].message) if caught else ""


def weight(net: Any) -> Tensor:
    found: Tensor = net[0].weight
    return found


@pytest.mark.parametrize(
    "penalty",
    [
        lambda net: sum(p.norm() for p in net.parameters()),
        lambda net: torch.sqrt(sum(p.pow(2).sum() for p in net.parameters())),
        lambda net: torch.stack([p.norm() for p in net.parameters()]).norm(),
        lambda net: weight(net).double().norm(1) ** 2,
        lambda net: (weight(net) ** 2).mean(),
        lambda net: weight(net).abs().max(),
        lambda net: weight(net).norm(dim=0).sum(),
        lambda net: weight(net).std(-2).sum(),
        lambda net: weight(net).flatten().norm(),
        lambda net: (weight(net) * weight(net)).sum() ** 0.5,
        lambda net: weight(net).pow(2).sum() * net[0].bias.pow(2).sum(),
    ],
)
def test_what_is_no_sum_over_elements_is_named(penalty: Penalty) -> None:
    """Norms, means, extremes and roots over the divided dimension."""
    assert "0.weight (" in said(penalty)


@pytest.mark.parametrize(
    "penalty",
    [
        lambda net: sum(p.pow(2).sum() for p in net.parameters()),
        lambda net: sum((p * p).sum() + p.abs().sum() for p in net.parameters()),
        lambda net: net[1].weight.norm() + net[1].bias.mean(),
        lambda net: weight(net).norm(dim=1).sum() + weight(net).std(-1).sum(),
        lambda net: (weight(net) - 1).square().sum() / 8,
        lambda net: applied(_ReduceLike, weight(net).pow(2).sum()).sqrt(),
        lambda net: applied(_ReduceLike, weight(net).norm() ** 2).sqrt(),
        lambda net: net(torch.ones(1, 3)).norm(),
    ],
)
def test_what_is_right_on_parts_passes(penalty: Penalty) -> None:
    """Sums over elements, whole weights, rows that are whole on a worker, and sums over the workers."""
    assert said(penalty) == ""


def divided(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Returns what two workers with divided layers are told of a right and of a wrong penalty."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    found = []
    original = torch.autograd.backward
    for penalty in (lambda p: p.square().sum(), lambda p: p.norm()):
        net = nn.Sequential(ColumnParallelLinear(4, 8, gather_output=False), RowParallelLinear(8, 4))
        net[1].input_is_parallel = True
        trained = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", OptionWarning)
            for _ in range(4):
                loss = trained(torch.ones(2, 4)).square().mean() + sum(penalty(p) for p in net.parameters()) * 1e-3
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([str(one.message) for one in caught if "no sum over elements" in str(one.message)])
    assert torch.autograd.backward is original
    return found[0], found[1]


def test_a_job_is_told_once() -> None:
    """A plain loop: the first losses are looked at, and backward is torch's own again."""
    for right, wrong in run_workers(divided, 2, backend=None):
        assert right == []
        assert len(wrong) == 1
        assert "0.weight (LinalgVectorNorm), 1.weight (LinalgVectorNorm)" in wrong[0]
