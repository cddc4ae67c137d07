"""Optimizers that the job does not know: one for a batch steps as it likes, one for the training is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from tests.strategies.reproducible.turns import network, rows, sgd, start, wrapped


def test_a_module_that_no_model_holds_is_not_trained_by_each_process_for_itself() -> None:
    start(2)
    model, optimizer = wrapped(network())
    head = nn.Linear(1, 1)
    own = sgd(head)

    def train() -> None:
        for rank in fleet.elastic.logical_ranks():
            head(model(rows(0, rank))).square().mean().backward()
            optimizer.step()
            own.step()

    with pytest.raises(
        ConfigError, match=r"SGD.step\(\) was called in a second batch.*Give its module to distributed_m"
    ):
        train()


def test_an_inner_loop_over_inputs_steps_in_its_batch() -> None:
    start(2)
    model, optimizer = wrapped(network())
    for rank in fleet.elastic.logical_ranks():
        x = rows(0, rank).requires_grad_()
        inner = torch.optim.SGD([x], 0.1)
        for _ in range(3):
            inner.zero_grad()
            x.square().sum().backward()
            inner.step()
        model(x.detach()).square().mean().backward()
        optimizer.step()


def test_steps_outside_of_a_batch_and_after_the_job_are_the_scripts_own() -> None:
    start(2)
    wrapped(network())
    other = network()
    own = sgd(other)
    for rank in range(3):
        other(rows(0, rank)).square().mean().backward()
        own.step()
