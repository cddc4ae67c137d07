"""What everyone forgets is one warning with its line; the same loop without the fault is silent (OwnRows, OwnDraws)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet
from fleet.checks import own_draws, own_rows, said_once
from fleet.checks.same_job import warn_of_versions
from fleet.errors import OptionWarning, UnsupportedOptionError
from tests.helpers.workers import run_workers

COVERED = (own_draws, own_rows, said_once)
Forward = Callable[[Any, Tensor], Tensor]


def plain(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def noised(model: Any, x: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    return (model(x + noise) - noise).square().mean()


def started(*layers: nn.Module) -> nn.Module:
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *layers)


def said(
    forward: Forward = plain,
    *layers: nn.Module,
    sampler: Callable[[Any], Any] = lambda data: DistributedSampler(data, fleet.worker_num(), fleet.worker_index()),
    sets_epoch: bool = True,
    own_seed: bool = False,
    steps: bool = True,
    evaluates: bool = False,
) -> list[str]:
    """Trains two epochs; returns the warnings, of which worker 0 gives those of the job."""
    net = started(*layers)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    if own_seed:
        torch.manual_seed(7 + fleet.worker_index())
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    divided = sampler(data)
    loader = DataLoader(data, 4, sampler=divided)
    tests = DataLoader(data, 4, sampler=DistributedSampler(data, fleet.worker_num(), fleet.worker_index()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            if sets_epoch and divided is not None:
                divided.set_epoch(epoch)
            for (x,) in loader:
                forward(model, x).backward()
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
            if evaluates:
                with torch.no_grad():
                    _ = [model.eval()(x) for (x,) in tests]
                model.train()
    return [str(one.message) for one in caught if issubclass(one.category, OptionWarning)]


def unwrapped(exchanges: bool) -> list[str]:
    net: nn.Module = started()
    net = DistributedDataParallel(net) if exchanges else net
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            plain(net, torch.full((2, 4), 1.0 + step + fleet.worker_index())).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
    return [str(one.message) for one in caught if issubclass(one.category, OptionWarning)]


def alone() -> list[str]:
    """Forgets everything: each worker trains the same model on the same rows."""
    net = started()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), 4, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loader:
            plain(net, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
    return [str(one.message) for one in caught if issubclass(one.category, OptionWarning)]


def by_hand(draws: bool) -> list[str]:
    """Trains without a DataLoader."""
    net = started()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    generator = torch.Generator().manual_seed(fleet.worker_index())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = torch.randn(4, 4) if draws else torch.randn(4, 4, generator=generator)
            plain(model, x).backward()
            optimizer.step()
    return [str(one.message) for one in caught if issubclass(one.category, OptionWarning)]


def forgotten(rank: int, world_size: int) -> dict[str, list[str]]:
    """Returns what is said of loops with one fault each, and of those without."""
    found = {
        "right": said(evaluates=True),
        "right, with draws": said(noised, nn.Dropout(0.5), own_seed=True),
        "right, wrapped by torch": unwrapped(exchanges=True),
        "right, without a DataLoader": by_hand(draws=False),
        "no sampler": said(sampler=lambda data: None),
        "one replica": said(sampler=lambda data: DistributedSampler(data, 1, 0)),
        "no set_epoch": said(sets_epoch=False),
        "no step": said(steps=False),
        "noise": said(noised),
        "masks": said(plain, nn.Dropout(0.5)),
        "noise without a DataLoader": by_hand(draws=True),
        "nothing wrapped": unwrapped(exchanges=False),
        "nothing at all": alone(),
    }
    started()
    for embedding in (nn.Embedding(4, 2, scale_grad_by_freq=True), nn.EmbeddingBag(4, 2, scale_grad_by_freq=True)):
        with pytest.raises(UnsupportedOptionError, match="counts|count in its own part of the batch"):
            fleet.distributed_model(nn.Sequential(embedding))
        embedding.weight.requires_grad_(False)
        fleet.distributed_model(nn.Sequential(embedding, nn.Linear(2, 2)))
    return found


def test_each_fault_is_said_once_with_its_line() -> None:
    """Two epochs of a small model; worker 0 speaks."""
    first, other = run_workers(forgotten, 2, backend=None, timeout_s=100)
    for name in first:
        assert other[name] == []
        if name.startswith("right"):
            assert first[name] == [], name
            continue
        assert len(first[name]) == 1, (name, first[name])
        assert "test_own_rows.py:" in first[name][0], name
    assert "workers 0, 1 train on the same rows" in first["no sampler"][0]
    assert "sampler=DistributedSampler(data, num_replicas=fleet.data_replicas()" in first["one replica"][0]
    assert "sampler.set_epoch(epoch)" in first["no set_epoch"][0]
    assert "Call optimizer.step()" in first["no step"][0]
    assert "step with different gradients" in first["nothing wrapped"][0]
    assert "train on the same rows, and neither" in first["nothing at all"][0]
    for name in ("noise", "masks", "noise without a DataLoader"):
        assert "Write torch.manual_seed(seed + fleet.worker_index()) after the model is made" in first[name][0]


def test_versions() -> None:
    """Equal ones pass; other ones are named with the workers that have them."""
    warn_of_versions({0: "torch 2.13.0", 1: "torch 2.13.0"})
    with pytest.warns(OptionWarning, match="torch 2.13.0 on rank 0; torch 2.12.1 on ranks 1, 2"):
        warn_of_versions({0: "torch 2.13.0", 1: "torch 2.12.1", 2: "torch 2.12.1"})
