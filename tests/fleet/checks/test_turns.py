"""The checks of a reproducible job: silent where processes host different numbers of logical workers."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fleet
from tests.helpers.workers import run_workers


def said(merged: int) -> list[str]:
    """Trains three epochs of two rounds with noise, dropout and batch norm; returns the warnings."""
    strategy = fleet.DistributedStrategy()
    strategy.reproducible = True
    strategy.reproducible_configs = {"logical_workers": 8}
    strategy.gradient_merge = merged > 1
    strategy.gradient_merge_configs = {"k_steps": merged}
    strategy.check_every = 1
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fleet.init(is_collective=True, strategy=strategy)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), 0.1))
        model = fleet.distributed_model(net)
        data = TensorDataset(torch.randn(48, 4))
        sampler = fleet.elastic.ElasticSampler(data, batch_size=3)
        loader = DataLoader(data, 3, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for (x,) in sampler.batches(loader):
                model(x + 0.1 * torch.randn_like(x)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [f"{one.message}" for one in caught if "gradient_merge_configs" not in f"{one.message}"]


def train(rank: int, world_size: int, merged: int) -> list[str]:
    return said(merged)


def test_uneven_hosts_train_without_a_warning() -> None:
    assert run_workers(train, 3, 1, backend=None) == [[], [], []]


def test_an_update_over_several_epochs_is_no_forgotten_step() -> None:
    assert run_workers(train, 3, 3, backend=None) == [[], [], []]
