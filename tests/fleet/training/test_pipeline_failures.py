"""A stage that raises, waits or dies: the others end with a message that names stage, micro-batch and peer."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from torch import Tensor

from fleet import fleet
from fleet.errors import RendezvousError
from fleet.meta_parallel import PipelineLayer
from tests.helpers.staged_training import CE, Case, batch_of, layers_of, start
from tests.helpers.workers import WorkerError, run_workers

_TIMEOUT_S = 4.0


def trains_until(rank: int, world_size: int, end: str) -> tuple[str, float]:
    """Returns what stage 0 says, and after how many seconds; stage 1 ends in the second step, at micro-batch 2."""
    start(Case({"pp_degree": 2, "dp_degree": 1}))
    calls = 0

    def loss(output: Tensor, label: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()  # without, two micro-batches are compared
        if calls == 7:
            if end == "raises":
                raise ArithmeticError("the loss is not defined")
            if end == "dies":
                os._exit(0)  # as a signal would; the helper gives a worker that fails less time than the peer needs
            time.sleep(2 * _TIMEOUT_S)
        return CE(output, label)

    layers = PipelineLayer(layers_of("plain"), loss_fn=loss)
    model = fleet.distributed_model(layers)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
    model.train_batch(list(batch_of("plain", 8)), optimizer)
    began = time.monotonic()
    try:
        model.train_batch(list(batch_of("plain", 8)), optimizer)
    except RendezvousError as error:
        if end == "dies":
            raise
        return str(error), time.monotonic() - began
    except ArithmeticError as error:
        return "; ".join(error.__notes__), time.monotonic() - began
    return "no error", time.monotonic() - began


_WAITED = re.compile(
    r"the gradient of micro-batch [12], from stage 1 \(worker 1\) Stage 0 was in the backward of micro-batch [12]\.|"
    r"the activation of micro-batch [23], for stage 1 \(worker 1\)"
)


def ends(end: str) -> list[tuple[str, float]]:
    environment = {"PADDLE_PG_TIMEOUT": str(int(1000 * _TIMEOUT_S))}
    found: list[tuple[str, float]] = run_workers(
        trains_until, 2, end, backend=None, timeout_s=60, environment=environment
    )
    return found


def test_a_stage_that_raises() -> None:
    """Study 6, failure: the stage says what it was doing, its peer which message did not come."""
    (waits, _), (raises, _) = ends("raises")
    assert raises == "Stage 1 was in the forward of micro-batch 2."
    assert _WAITED.search(waits), waits


@pytest.mark.slow
def test_a_stage_that_dies() -> None:
    """Study 6, failure: a process that is gone; the peer's message is the one that is reported."""
    with pytest.raises(WorkerError) as caught:
        ends("dies")
    assert _WAITED.search(str(caught.value)), str(caught.value)


@pytest.mark.slow
def test_a_stage_that_waits() -> None:
    """Study 6, failure: the others do not wait longer than the timeout."""
    (waits, seconds), _ = ends("waits")
    assert _WAITED.search(waits), waits
    assert seconds < 2 * _TIMEOUT_S + 30
