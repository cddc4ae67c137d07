"""TurnOptimizer: one step() for each turn, one update for all of them."""

from __future__ import annotations

import copy

import torch

import fleet
from fleet.job.running import running_job
from fleet.strategies._shared.optimizer_wrapper import wrapper_in
from fleet.strategies.reproducible.turn_optimizer import TurnOptimizer
from tests.strategies.reproducible.turns import network, same, square, start, train, turns, weights, wrapped


def test_it_updates_in_the_last_turn() -> None:
    start(3)
    net = network()
    model, optimizer = wrapped(net)
    before = weights(net)
    changed, only_counts = [], []
    for rank in fleet.elastic.logical_ranks():
        square(model, 0, rank).backward()
        only_counts.append(optimizer.only_counts())
        optimizer.step()
        changed.append(not same(weights(net), before))
    assert changed == [False, False, True]
    assert only_counts == [True, True, False]


def test_the_job_counts_updates() -> None:
    start(3)
    model, optimizer = wrapped(network())
    train(model, optimizer, range(2))
    job = running_job()
    assert job is not None
    assert job.num_steps == 2


def test_hooks_of_the_users_optimizer_run_once_an_update() -> None:
    start(3)
    net = network()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[int] = []
    inner.register_step_pre_hook(lambda *_: seen.append(turns().rank))
    model, optimizer = wrapped(net, inner)
    train(model, optimizer, range(2))
    assert seen == [2, 2]


def test_a_copy_is_an_optimizer_without_turns() -> None:
    start(2)
    model, optimizer = wrapped(network())
    train(model, optimizer, range(1))
    inner = wrapper_in(optimizer.optimizer, TurnOptimizer)
    assert inner is not None
    copied = copy.deepcopy(inner)
    assert copied._buffers is None  # type: ignore[comparison-overlap]
    assert len(copied.param_groups) == 1
