"""Workers with different options or models are told which before anything is exchanged."""

from __future__ import annotations

import torch

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers


def _options(rank: int, world_size: int) -> str:
    strategy = fleet.DistributedStrategy()
    strategy.amp_configs = {"init_loss_scaling": 4.0 if rank == 1 else 8.0}
    strategy.gradient_merge = rank == 2
    try:
        fleet.init(is_collective=True, strategy=strategy)
    except ConfigError as error:
        return f"{error}"
    return ""


def test_the_option_that_differs_is_named() -> None:
    for said in run_workers(_options, 3, backend=None):
        assert "strategy.amp_configs.init_loss_scaling: 8.0 on ranks 0, 2; 4.0 on rank 1" in said
        assert "strategy.gradient_merge: False on ranks 0, 1; True on rank 2" in said


def _late_options(rank: int, world_size: int) -> str:
    fleet.init(is_collective=True)
    strategy = fleet.DistributedStrategy()
    strategy.gradient_merge = rank == 1
    try:
        fleet.distributed_optimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1), strategy)
    except ConfigError as error:
        return f"{error}"
    return ""


def test_options_that_come_with_the_optimizer_are_compared() -> None:
    for said in run_workers(_late_options, 2, backend=None):
        assert "fleet.distributed_optimizer()" in said
        assert "strategy.gradient_merge: False on rank 0; True on rank 1" in said


def _models(rank: int, world_size: int, case: str) -> str:
    fleet.init(is_collective=True)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3 if case == "shape" and rank else 2))
    if case == "more" and rank:
        net.append(torch.nn.Linear(2, 2))
    if case == "frozen" and rank:
        net[0].bias.requires_grad_(False)
    if case == "order" and rank:
        net = torch.nn.Sequential()
        net.add_module("1", torch.nn.Linear(2, 2))
        net.add_module("0", torch.nn.Linear(2, 2))
    try:
        fleet.distributed_model(net)
    except ConfigError as error:
        return f"{error}"
    return ""


def test_the_parameter_that_differs_is_named() -> None:
    """torch hangs, or says that shapes did not match, without a name."""
    for case, expected in {
        "shape": "1.weight: a parameter with shape (2, 2), torch.float32, requires_grad=True on rank 0; a parameter",
        "more": "2.weight: nothing on rank 0; a parameter with shape (2, 2)",
        "frozen": "0.bias: a parameter with shape (2,), torch.float32, requires_grad=True on rank 0; a parameter with "
        "shape (2,), torch.float32 on rank 1",
        "order": "the order of the parameters: that of 0.weight",
    }.items():
        assert all(expected in said for said in run_workers(_models, 2, case, backend=None)), case
    assert run_workers(_models, 2, "equal", backend=None) == ["", ""]
