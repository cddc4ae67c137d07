"""to_static compiles the wrapped module; the numbers are those of the eager one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers


def train(rank: int, world_size: int, compiled: bool, by_script: bool = False) -> dict[str, Any]:
    """Trains three steps and returns the state; ``by_script`` compiles what ``distributed_model()`` returned."""
    strategy = fleet.DistributedStrategy()
    strategy.to_static = compiled
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model = fleet.distributed_model(net)
    forward: Any = torch.compile(model, backend="eager") if by_script else model
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        forward(x).square().mean().backward()
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


def test_a_script_compiles_the_wrapped_model() -> None:
    """The compiler does not trace what the checks look at, which failed with its own error."""
    eager, compiled = (run_workers(train, 2, False, by_script, backend=None)[0] for by_script in (False, True))
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, atol=1e-6, rtol=1e-5)


def test_configs_are_checked() -> None:
    """A mode that torch.compile does not know is refused when it is set."""
    strategy = fleet.DistributedStrategy()
    with pytest.raises(ConfigError, match="one of 'default', 'reduce-overhead'"):
        strategy.to_static_configs = {"mode": "fast"}


class Broken(nn.Module):
    """A layer and batch norm, with a line between them that the compiler gives up on."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.breaks = nn.Linear(4, 4), nn.BatchNorm1d(4), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of ``x``."""
        x = self.layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.norm(x)  # type: ignore[no-any-return]


def statistics(rank: int, world_size: int) -> list[tuple[int, torch.Tensor]]:
    """Returns the statistics of a recomputed batch norm: plain, then compiled whole, broken, and in sharded units."""
    found = []
    for compiled, breaks, stage in ((False, False, 1), (True, False, 1), (True, True, 1), (True, False, 3)):
        strategy = fleet.DistributedStrategy()
        strategy.to_static = compiled
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": ["0"]}
        strategy.sharding = True
        strategy.sharding_configs = {"sharding_degree": 2, "stage": stage, "segment_broadcast_MB": 0.00002}
        fleet.init(is_collective=True, strategy=strategy)
        torch.manual_seed(0)
        net = nn.Sequential(Broken(breaks), nn.Linear(4, 1))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        model = fleet.distributed_model(net)
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((int(net[0].norm.num_batches_tracked), net[0].norm.running_mean))  # type: ignore[arg-type, union-attr]
    return found


@pytest.mark.slow  # the compiler
def test_statistics_of_recomputed_norms_move_once() -> None:
    """A.2 recompute_configs: compiled as a whole or not, batch-norm statistics move once for each batch."""
    for found in run_workers(statistics, 2, backend=None, timeout_s=240):
        assert [count for count, _ in found] == [3, 3, 3, 3]
        for _, mean in found[1:]:
            torch.testing.assert_close(mean, found[0][1], atol=1e-6, rtol=0)
