"""Exchanges replayed for an estimate (issue 3): buckets, owners, wire copies, averages."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fleet.estimate.exchanged_training import Averages, Buckets, Exchange, LogicalSums, SharedUpdate, bytes_of
from fleet.estimate.storage_tracker import StorageTracker


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, 1, bias=False) for width in widths))


def backward(model: nn.Module) -> None:
    sum(p.sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]


def test_gradients_move_into_their_buckets() -> None:
    """The last batch of a window exchanges; the others keep their own sums, which are gradients too."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(100)
        exchange = Buckets(tracker, model)
        parameter = next(model.parameters())
        exchange.begin_batch(False)
        backward(model)
        first = parameter.grad
        assert tracker.usage().largest["gradients"] == 800
        exchange.begin_batch(True)
        backward(model)
        assert parameter.grad is not first
        parameter.grad = None
        exchange.begin_batch(True)
        backward(model)
    assert first is not None
    assert tracker.usage().largest["gradients"] == 800


def test_a_single_worker_holds_its_gradients_only() -> None:
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(100)
        Exchange(tracker, model)
        backward(model)
        assert tracker.usage().largest["gradients"] == 400


def test_frozen_parameters_have_no_bucket() -> None:
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(100, 50)
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        Buckets(tracker, model)
    assert tracker.usage().largest["gradients"] == 200


def test_the_owner_of_most_parameters() -> None:
    """Of 8, 3, 3 and 1 rows for two workers one owns 8, the other 7; the first is what an estimate shows."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(1, 8, 3, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exchange = SharedUpdate(tracker, model, 2, 1024.0)
        exchange.take_over(optimizer)
        assert [p.numel() for p in optimizer.param_groups[0]["params"]] == [8]
        exchange.end_step()
    assert tracker.usage().largest["communication"] == 4 * 15


def test_averages_go_in_pieces() -> None:
    """Flat copies are of 64 MiB and what the tensor that fills one has more."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(10 * 2**20, 10 * 2**20, 10 * 2**20)
        Averages(tracker, model).end_step()
        assert bytes_of(model.parameters()) == 120 * 2**20
    assert tracker.usage().largest["communication"] == 80 * 2**20


def test_logical_workers_keep_sums_of_nodes() -> None:
    """Four in one process: (0 1) and 2 wait when 3 is added; the last gradient, its copy and the update's are three."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(100)
        exchange = LogicalSums(tracker, model, 4, 1)
        for turn in range(4):
            exchange.begin_batch(turn == 3)
            backward(model)
            exchange.end_backward()
        exchange.end_step()
        model[0].weight.grad = None  # type: ignore[index, union-attr]
    assert tracker.usage().largest["gradients"] == (2 + 1 + 1) * 400
    assert tracker.usage().largest["communication"] == 400


def test_blocks_that_are_no_nodes_travel_apart() -> None:
    """Of 8 on 3 processes a block is two nodes: a gradient, both sums side by side, and 5 / 3 that are received."""
    with FakeTensorMode(), StorageTracker("cpu") as tracker:
        model = layers(300)
        exchange = LogicalSums(tracker, model, 8, 3)
        exchange.begin_batch(True)
        backward(model)
        exchange.end_backward()
    assert tracker.usage().largest["communication"] == (1 + 2) * 1200 + 5 * 400
