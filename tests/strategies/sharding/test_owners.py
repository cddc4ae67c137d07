"""Stage 1: who owns which parameter (A.10, V1 partition), and what sees all of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fleet
from fleet.strategies.sharding.owners import plan_owners
from tests.helpers.workers import run_workers


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_largest_first_to_the_lightest(sizes: list[int], degree: int) -> None:
    """A.10: sorted by size, the largest first, each to the worker with least; the written-out loop."""
    loads = [0] * degree
    expected = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        expected[place] = loads.index(min(loads))
        loads[expected[place]] += sizes[place]
    assert plan_owners(sizes, degree) == expected
    assert not sizes or max(loads) - min(loads) <= max(sizes)


def test_later_parameters_go_where_there_is_room() -> None:
    """What is owned already counts."""
    assert plan_owners([5, 5], 2, [0, 100]) == [0, 0]


def clipped_steps(net: nn.Module, wrap: Callable[[Any, nn.Module], tuple[Any, nn.Module]]) -> dict[str, list[float]]:
    """Runs three steps with grad_clip and with hooks that were made before and after wrapping."""
    seen: dict[str, list[float]] = {"before": [], "after": [], "post": []}
    clip = fleet.ClipGradByGlobalNorm(0.1)
    optimizer = fleet.optimizer.Momentum(1.0, 0.9, net.parameters(), grad_clip=clip)

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            found = [p.grad if name != "post" else p for p in net.parameters()]
            seen[name].append(float(torch.nn.utils.get_total_norm([t.detach() for t in found if t is not None])))

        return hook

    optimizer.register_step_pre_hook(note("before"))
    stepped, model = wrap(optimizer, net)
    stepped.register_step_pre_hook(note("after"))
    stepped.register_step_post_hook(note("post"))
    for _ in range(3):
        (100 * model(torch.ones(2, 4)).square().mean()).backward()
        stepped.step()
        stepped.zero_grad()
    return seen


def net_of_layers() -> nn.Module:
    """Returns a net whose parameters have two owners."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def sharded_steps(rank: int, world_size: int) -> tuple[dict[str, list[float]], list[float]]:
    """Runs the steps in stage 1."""
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": 2, "stage": 1}
    fleet.init(is_collective=True, strategy=strategy)
    net = net_of_layers()
    seen = clipped_steps(net, lambda o, n: (fleet.distributed_optimizer(o), fleet.distributed_model(n)))
    return seen, [float(p.detach().sum()) for p in net.parameters()]


def test_clipping_and_hooks_see_every_gradient() -> None:
    """Issue 9, 1.4: grad_clip and step hooks see what they see in one process, once; post hooks all parameters."""
    net = net_of_layers()
    expected = clipped_steps(net, lambda o, n: (o, n))
    for seen, sums in run_workers(sharded_steps, 2, backend=None):
        for name, values in expected.items():
            assert seen[name] == pytest.approx(values, rel=1e-5), name
        assert sums == pytest.approx([float(p.detach().sum()) for p in net.parameters()], rel=1e-4, abs=1e-5)
