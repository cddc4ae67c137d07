"""to_static compiles the wrapped module; the numbers are those of the eager one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers


def train(rank: int, world_size: int, compiled: bool) -> dict[str, Any]:
    """Trains three steps and returns the state."""
    strategy = fleet.DistributedStrategy()
    strategy.to_static = compiled
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model = fleet.distributed_model(net)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compiled == hasattr(model._chain, "_orig_mod")
    return dict(model.state_dict())


@pytest.mark.slow  # the compiler takes half a minute on a small machine
def test_compiled_equals_eager() -> None:
    """002-09: the counterpart of the static graph trains to the same numbers, under data parallel."""
    eager = run_workers(train, 2, False, backend=None)
    compiled = run_workers(train, 2, True, backend=None, timeout_s=240)
    for name, value in eager[0].items():
        torch.testing.assert_close(compiled[0][name], value, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(compiled[0][name], compiled[1][name], atol=0, rtol=0)


def test_configs_are_checked() -> None:
    """A mode that torch.compile does not know is refused when it is set."""
    strategy = fleet.DistributedStrategy()
    with pytest.raises(ConfigError, match="one of 'default', 'reduce-overhead'"):
        strategy.to_static_configs = {"mode": "fast"}
