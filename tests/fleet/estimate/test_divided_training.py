"""Stages 2 and 3 of sharding replayed for an estimate (issue 3): parts, units and when they are whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fleet.estimate.divided_training import Divided
from fleet.estimate.storage_tracker import StorageTracker

ONE = 4 * 64 * 64  # bytes of a layer


def run(reshard: bool, on_host: bool) -> StorageTracker:
    """Runs a batch through four units of one layer, with two workers."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        tracker.mark(model.parameters(), "parameters")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exchange = Divided(tracker, model, ["0", "1", "2", "3"], 2, reshard=reshard, on_host=on_host)
        exchange.take_over(optimizer)
        assert [tuple(p.shape) for p in optimizer.param_groups[0]["params"]] == [(32, 64)] * 4
        tracker.phase = "forward"
        exchange.begin_batch(True)
        loss = model(torch.empty(2, 64)).mean()
        tracker.phase = "backward"
        loss.backward()
        exchange.end_backward()
        assert all(p.grad is None for p in model.parameters())
        parts = optimizer.param_groups[0]["params"]
        assert all(p.grad is not None and p.grad.shape == p.shape for p in parts)
    return tracker


@pytest.mark.parametrize(("reshard", "whole"), [(False, 4), (True, 1)])
def test_whole_units(reshard: bool, whole: int) -> None:
    """Stage 2 holds all units whole from forward on, stage 3 the one that runs; the parts are two layers' worth."""
    used = run(reshard, on_host=False).usage()
    assert used.largest["parameters"] == 2 * ONE + whole * ONE


@pytest.mark.parametrize(("reshard", "on_host", "buffers"), [(False, False, 2), (True, False, 2), (True, True, 4)])
def test_buffers(reshard: bool, on_host: bool, buffers: int) -> None:
    """Two gathers overlap in forward, a reduction and a gather in backward; gloo works in copies of them."""
    used = run(reshard, on_host).usage()
    assert used.largest["communication"] == buffers * ONE


def test_everything_whole_is_given_up() -> None:
    """After backward only the parts and their gradients are left."""
    tracker = run(True, on_host=True)
    with FakeTensorMode(), tracker:
        tracker.phase = "step"
        held = tracker.hold(100 * ONE, "temporary")
    at_peak = tracker.usage().at_peak
    assert at_peak["communication"] == 0
    assert at_peak["temporary"] >= held.size_bytes
    assert at_peak["parameters"] <= 2 * ONE
