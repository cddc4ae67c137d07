"""The workers call fleet.mean from the same lines, in the same order and as often, or are told where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

import fleet
from fleet.errors import FleetError
from fleet.training.mean_order import MeanOrder
from tests.helpers.checked_training import message, start
from tests.helpers.mean_training import Case, net_of
from tests.helpers.workers import run_workers


def alike(out: Tensor, is_odd: bool) -> Tensor:
    return fleet.mean(out.sum(), 4) + fleet.mean(out.square().sum(), 3)


def swapped(out: Tensor, is_odd: bool) -> Tensor:
    if is_odd:
        loss = fleet.mean(out.square().sum(), 3)
        return loss + fleet.mean(out.sum(), 4)
    loss = fleet.mean(out.sum(), 4)
    return loss + fleet.mean(out.square().sum(), 3)


def branched(out: Tensor, is_odd: bool) -> Tensor:
    loss = fleet.mean(out.sum(), 4)
    if is_odd:
        loss = loss + fleet.mean(out.square().sum(), 3)
    return loss


def without_rows(out: Tensor, is_odd: bool) -> Tensor:
    return fleet.mean(0 * out.sum(), 0) if is_odd else fleet.mean(out.sum(), 4)


def train(terms: Callable[[Tensor, bool], Tensor], odd_step: int) -> None:
    """Trains; in one step worker 1 takes another way through the ``terms``."""
    start({})
    net = net_of(Case(30, 2, 1, "plain", "one"))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for step in range(3):
        terms(model(torch.ones(2, 6)), fleet.worker_index() == 1 and step == odd_step).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate() -> str:
    """Takes means without gradients, of which a worker leaves one out late; returns what it is told."""
    try:
        take_means()
    except FleetError as error:
        return str(error)
    return ""


def take_means() -> None:
    start({})
    for _ in range(70):
        fleet.mean(torch.ones(()), 1)
    for batch in range(2):
        fleet.mean(torch.ones(()), 1)
        if fleet.worker_index() == 0 and batch == 0:
            fleet.mean(torch.ones(()), 2)


def loops(rank: int, world_size: int) -> dict[str, str]:
    cases = [(terms, step) for terms in (alike, without_rows, swapped) for step in (0, 1)] + [(branched, 0)]
    found = {f"{terms.__name__} {step}": message(lambda t=terms, s=step: train(t, s)) for terms, step in cases}
    return found | {"evaluated": evaluate()}


def test_workers_at_unlike_means_are_told_where_they_are() -> None:
    """By a meeting in the first update, and by the marks of exchanges later."""
    told = 0
    for found in run_workers(loops, 2, backend=None):
        for terms in ("alike", "without_rows"):
            assert found[f"{terms} 0"] == found[f"{terms} 1"] == ""
        for step in (0, 1):
            text = found[f"swapped {step}"]
            assert "rank 0: fleet.mean(), call 1 since the last update, " in text
            assert "rank 1: fleet.mean(), call 1 since the last update, " in text
            assert "`loss = fleet.mean(out.sum(), 4)`" in text
            assert "`loss = fleet.mean(out.square().sum(), 3)`" in text
        assert "rank 0: backward(), after call 1 since the last update, " in found["branched 0"]
        assert "rank 1: fleet.mean(), call 2 since the last update, " in found["branched 0"]
        text = found["evaluated"]
        if "which serves the rendezvous, has ended" not in text:  # worker 0 had read the account, raised and left
            assert "rank 0: fleet.mean(), call 72 since" in text
            assert "`fleet.mean(torch.ones(()), 2)`" in text
            told += 1
    assert told


def late(rank: int, world_size: int) -> str:
    try:
        train(branched, 1)
    except (FleetError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_late_branch_of_one_worker_meets_nobody() -> None:
    """The order is new to it alone; the others wait in the exchange of gradients."""
    text = run_workers(late, 2, backend=None, environment={"FLEET_WAIT_LIMIT": "1"})[1]
    assert "fleet.mean() or the backward() after it at " in text
    assert "every worker must make this call, and rank 0 cannot" in text
    assert "`loss = loss + fleet.mean(out.square().sum(), 3)`" in text
    assert "`terms(model(torch.ones(2, 6))" in text


def test_an_unlike_mean_on_an_accelerator_is_nan() -> None:
    """Nothing waits for the sums there."""
    order = MeanOrder(cast(Any, SimpleNamespace()))
    sums = torch.tensor([6.0, 3.0, 2.0, 14.0, 98.0])
    assert order.agreed(sums, ()).tolist() == sums.tolist()
    sums[-1] = 100.0
    assert all(math.isnan(one) for one in order.agreed(sums, ()))
