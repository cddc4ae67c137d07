"""Weights that something changes once a batch are noticed, where that makes the result depend on the processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers

Change = Callable[[nn.Module, bool], None]


def train(change: Change, net: nn.Module | None = None, **options: bool) -> None:
    """Trains three updates of two logical workers; ``change`` gets the model after each step."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 2}
    strategy.update(options)
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


def clamp_data(net: nn.Module, ends_update: bool) -> None:
    # After the first change it changes nothing.
    next(net.parameters()).data.clamp_(-0.01, 0.01)


def test_a_change_in_the_first_update_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'weight' was changed in the batch of logical worker 0"):
        train(clamp_data)


def nothing(net: nn.Module, ends_update: bool) -> None:
    """Changes nothing."""


def test_weights_that_are_nan_stay() -> None:
    net = nn.Linear(4, 1)
    net.weight.data.fill_(float("nan"))
    train(nothing, net)


def test_parameters_without_a_gradient_may_be_of_any_type() -> None:
    net = nn.Linear(4, 1)
    net.register_parameter("places", nn.Parameter(torch.arange(3), requires_grad=False))
    net.register_parameter("mask", nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False))
    train(nothing, net)


def test_masks_that_the_first_forward_chooses_are_no_change() -> None:
    train(nothing, nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 1)), asp=True)


def test_a_lazy_layer_is_completed_before_its_optimizer_is_wrapped() -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.LazyLinear(1))
    with pytest.raises(
        ConfigError, match=r"no shape before its first forward, and reproducible .* Run the model on a batch first"
    ):
        train(nothing, net)
    net(torch.ones(1, 4))
    train(nothing, net)


def _grown(rank: int, world_size: int) -> dict[str, Tensor]:
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 4}
    torch.manual_seed(0)
    fleet.init(is_collective=True, strategy=strategy)
    net = nn.Sequential(nn.Linear(4, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for update in range(3):
        for _ in fleet.elastic.logical_ranks():
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if fleet.update_loss(loss) is not None and not update:
                net.append(nn.Linear(1, 1))
                optimizer.add_param_group({"params": list(net[1].parameters())})
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_parameters_that_come_between_updates_train() -> None:
    alone = _grown(0, 1)
    for found in run_workers(_grown, 2, backend=None):
        torch.testing.assert_close(found, alone, rtol=0, atol=0)


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

    with pytest.raises(ConfigError, match=r"distributed_optimizer\(\) has not seen that optimizer"):
        run()
