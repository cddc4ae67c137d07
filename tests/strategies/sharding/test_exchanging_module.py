"""When a wrapped model exchanges gradients, and whose buffers it has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleet.strategies.sharding.exchanging_module import ExchangingModule
from tests.helpers.workers import run_workers


def test_no_sync_ends_as_it_began() -> None:
    model = ExchangingModule(nn.Linear(2, 2), None)
    with model.no_sync():
        assert not model.exchanges
        assert not model.require_backward_grad_sync
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        assert not model.exchanges
    assert model.exchanges
    assert model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    model.set_exchanges(True)  # an option that exchanges at the end of its window
    with model.no_sync():
        assert not model.exchanges
    assert model.exchanges
    assert model.held


def buffers(rank: int, world_size: int) -> list[float]:
    """Returns the running mean in evaluation, without gradients, and before a forward that trains."""
    norm = nn.BatchNorm1d(1)
    norm.running_mean += rank + 1
    model = ExchangingModule(norm, dist.group.WORLD)
    found = []
    for trains, grad in ((False, True), (True, False), (True, True)):
        model.train(trains)
        with torch.set_grad_enabled(grad):
            model.share_buffers()
        found.append(float(norm.running_mean))
    return found


def test_buffers_are_those_of_rank_0_in_training_alone() -> None:
    assert run_workers(buffers, 2) == [[1.0, 1.0, 1.0], [2.0, 2.0, 1.0]]
