"""Weights that something changes once a batch are noticed, where that makes the result depend on the processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError

Change = Callable[[nn.Module, bool], None]


def train(change: Change, net: nn.Module | None = None) -> None:
    """Trains three updates of two logical workers; ``change`` gets the model after each step."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 2}
    torch.manual_seed(0)
    fleet.init(is_collective=True, strategy=strategy)
    net = net or nn.Linear(4, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for _ in range(3):
        for _ in fleet.elastic.logical_ranks():
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            change(net, fleet.update_loss(loss) is not None)


@torch.no_grad()
def decay(net: nn.Module, ends_update: bool) -> None:
    next(net.parameters()).mul_(0.99)


def decay_data(net: nn.Module, ends_update: bool) -> None:
    next(net.parameters()).data.mul_(0.99)


def replace_data(net: nn.Module, ends_update: bool) -> None:
    weight = next(net.parameters())
    weight.data = weight.data * 0.99


@pytest.mark.parametrize("change", [decay, decay_data, replace_data])
def test_a_change_once_a_batch_is_refused(change: Change) -> None:
    with pytest.raises(ConfigError, match=r"'weight' was changed .* 'reproducible' .* fleet\.update_loss"):
        train(change)


def test_a_change_once_an_update_acts() -> None:
    train(lambda net, ends_update: decay(net, ends_update) if ends_update else None)


def test_a_projection_that_changes_nothing_is_no_change() -> None:
    train(lambda net, ends_update: next(net.parameters()).data.clamp_(-100, 100))


class Momentum(nn.Module):
    """A momentum encoder, moved in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 1)
        self.key = nn.Linear(4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data = mine.data * 0.9 + other.data * 0.1
        return self.query(x) + self.key(x)


def test_a_momentum_encoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'key\.weight' was changed .* by the model's forward"):
        train(lambda net, ends_update: None, Momentum())


def test_an_optimizer_that_fleet_did_not_wrap_is_refused() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 2}
    torch.manual_seed(0)
    fleet.init(is_collective=True, strategy=strategy)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = fleet.distributed_model(net)

    def run() -> None:
        for _ in range(3):
            for _ in fleet.elastic.logical_ranks():
                model(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(ConfigError, match=r"an optimizer that distributed_optimizer\(\) did not return"):
        run()
