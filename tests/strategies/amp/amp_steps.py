"""What the tests of amp share: a session with amp on, small nets, and hand-written torch to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fleet


def start(configs: dict[str, Any], **options: Any) -> None:
    """Starts a session with amp and the other ``options`` on."""
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = configs
    for name, value in options.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")


def net_of(seed: int = 0) -> nn.Sequential:
    """Returns a small net with a norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def sgd(net: nn.Module) -> torch.optim.SGD:
    """Returns SGD with momentum on ``net``."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def fast_sgd(net: nn.Module) -> torch.optim.SGD:
    """Returns SGD with a learning rate that makes up for the factor of :func:`small_loss`."""
    return torch.optim.SGD(net.parameters(), lr=1e6, momentum=0.9)


def wrapped(net: nn.Module, optimizer: torch.optim.Optimizer, optimizer_first: bool = True) -> tuple[Any, Any]:
    """Returns model and optimizer of fleet, wrapped in either order."""
    if optimizer_first:
        optimizer = fleet.distributed_optimizer(optimizer)
        return fleet.distributed_model(net), optimizer
    model = fleet.distributed_model(net)
    return model, fleet.distributed_optimizer(optimizer)


def batches(count: int, rank: int = 0) -> Iterator[Tensor]:
    """Yields inputs of shape [5, 6]."""
    for step in range(count):
        yield torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def small_loss(out: Tensor) -> Tensor:
    """Returns a loss whose float16 gradients vanish unless they are scaled."""
    return out.square().mean() * 1e-7


def hand_written(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    count: int,
    loss_of: Callable[[Tensor], Tensor],
    dtype: torch.dtype = torch.float16,
    init_scale: float = 32768.0,
) -> list[Tensor]:
    """Trains by torch's own recipe; returns the first weight's gradient at each step, unscaled."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=dtype == torch.float16)
    seen = []
    for x in batches(count):
        with torch.autocast("cpu", dtype=dtype):
            out = net(x)
        scaler.scale(loss_of(out.float())).backward()
        scaler.unscale_(optimizer)
        seen.append(next(net.parameters()).grad.clone())  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def flat(module: Any) -> Tensor:
    """Returns all parameters as one float32 vector."""
    return torch.cat([p.detach().float().flatten() for p in module.parameters()])
