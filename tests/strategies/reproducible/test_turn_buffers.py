"""Buffers: each logical worker has its own in a turn, and logical worker 0's are the model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import rows, same, start, turns, weights, wrapped


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Counting(nn.Module):
    """Computes with its buffer, and changes it in each forward, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.factor: Tensor
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.factor
        self.factor = self.factor + x.detach().mean()
        return found


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_models_statistics_are_those_of_logical_worker_0(num: int) -> None:
    """As in DistributedDataParallel; each forward of a turn begins with the model's."""
    start(num)
    net = normed()
    plain = copy.deepcopy(net)
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.0))
    for update in range(3):
        before = {name: value.clone() for name, value in net.named_buffers()}
        for rank in fleet.elastic.logical_ranks():
            assert all(torch.equal(value, before[name]) for name, value in net.named_buffers())
            model(rows(update, rank)).mean().backward()
            optimizer.step()
        plain(rows(update, 0))
        assert same(weights(net), weights(plain))


def test_they_are_the_models_in_the_last_turn_already() -> None:
    """Where fleet.update_loss() has returned a number, a script evaluates and saves."""
    start(3)
    net = normed()
    plain = copy.deepcopy(net)
    model, optimizer = wrapped(net, torch.optim.SGD(net.parameters(), lr=0.0))
    for rank in fleet.elastic.logical_ranks():
        model(rows(0, rank)).mean().backward()
        optimizer.step()
        if turns().is_last:
            plain(rows(0, 0))
            assert same(weights(net), weights(plain))


def test_a_round_without_a_step_has_them_at_its_end() -> None:
    start(3)
    net = normed()
    plain = copy.deepcopy(net)
    model, _ = wrapped(net)
    for rank in fleet.elastic.logical_ranks():
        with torch.no_grad():
            model(rows(0, rank))
    plain(rows(0, 0))
    assert same(weights(net), weights(plain))


def test_a_buffer_that_is_registered_amid_a_round_is_refused() -> None:
    start(2)
    net = normed()
    model, optimizer = wrapped(net)
    ranks = fleet.elastic.logical_ranks()
    next(ranks)
    net.register_buffer("late", torch.ones(3))
    model(rows(0, 0)).mean().backward()
    with pytest.raises(ConfigError, match="1 buffers were registered since the round began"):
        optimizer.step()


def counted(rank: int, world_size: int, num: int) -> list[dict[str, Tensor]]:
    """Trains two models by turns, which see each other's outputs; returns what the last turn has."""
    start(num)
    torch.manual_seed(0)
    nets = Counting(), Counting()
    models: list[Any] = [fleet.distributed_model(net) for net in nets]
    optimizers = [fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in nets]
    found = []
    for update in range(3):
        for logical_rank in fleet.elastic.logical_ranks():
            models[0](rows(update, logical_rank)).square().mean().backward()
            (models[1](rows(update, logical_rank)) - models[0](rows(update, logical_rank))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if turns().is_last:
                found += [weights(net) for net in nets]
    return found


@pytest.mark.parametrize("num", [2, 3])
def test_they_are_the_same_on_any_number_of_workers(num: int) -> None:
    (alone,) = run_workers(counted, 1, num, backend=None)
    for found in run_workers(counted, num, num, backend=None):
        assert all(same(one, other) for one, other in zip(found, alone, strict=True))
