"""A listener hears what a job does, and costs nothing at the points that it does not override."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.job.listener import HOOKS, Listener, Listeners
from fleet.job.wrapped_model import WrappedModel
from tests.helpers.fleets import own_fleet
from tests.helpers.workers import run_workers


def test_a_listener_hears_a_small_training(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    said: Any = {hook: lambda self, *_, hook=hook: heard.append(hook) for hook in HOOKS}
    listener: Listener = type("Heard", (Listener,), said)()
    own = own_fleet(monkeypatch)
    own.init(is_collective=True)
    own.session.job.listeners.add(listener)
    net = nn.Linear(2, 1)
    model = own.distributed_model(net)
    optimizer = own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.clear_gradients()
    model.load_state_dict(model.state_dict())
    own.session.close()
    wrapping = ["before_wrap", "model_wrapped", "optimizer_unwrapped", "optimizer_wrapped"]
    step = ["before_forward", "forward_begins", "forward_ends", "gradients_arrived", "before_step", "after_update"]
    ending = ["after_step", "gradients_cleared", "before_save", "state_loaded", "close"]
    assert heard == [*wrapping, *step, *ending]


def exchanging(rank: int, world_size: int) -> list[str]:
    """Trains a step on several workers; returns the hooks that concern the others."""
    heard: list[str] = []

    class Heard(Listener):
        """Hears of other workers."""

        def gradients_arrived(self, model: WrappedModel) -> None:
            """Notes it."""
            heard.append("arrived")

        def exchange_ended(self, model: WrappedModel) -> None:
            """Notes the gradient, which is the mean of all workers."""
            heard.append(f"exchanged {next(model.module.parameters()).grad}")

        def workers_meet(self, call: str) -> None:
            """Notes the call."""
            heard.append(call)

    fleet.init(is_collective=True, log_level="ERROR")
    fleet.session.job.listeners.add(Heard())
    net = nn.Linear(1, 1, bias=False)
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    optimizer.clear_grad()
    model(torch.full((1, 1), float(rank))).sum().backward()
    fleet.util.barrier()
    return heard


def test_exchanges_and_meetings_are_heard() -> None:
    said = ["arrived", "arrived", "exchanged tensor([[0.5000]])", "fleet.util.barrier()"]
    assert run_workers(exchanging, 2, backend=None) == [said, said]


def test_a_listener_that_sleeps_hears_no_steps() -> None:
    class Counts(Listener):
        def after_step(self, step: int) -> None:
            """Hears a step."""

        def close(self) -> None:
            """Hears the end."""

    listeners, counts = Listeners(), Counts()
    listeners.add(counts)
    listeners.put_to_sleep(counts)
    assert (listeners.hearing["after_step"], listeners.hearing["close"]) == ((), (counts,))
    listeners.wake(counts)
    assert listeners.hearing["after_step"] == (counts,)


def test_only_those_that_override_a_hook_hear_it() -> None:
    class Counts(Listener):
        def after_step(self, step: int) -> None:
            """Hears one hook."""

    listeners, counts = Listeners(), Counts()
    listeners.add(counts)
    assert listeners.hearing["after_step"] == (counts,)
    assert listeners.hearing["before_step"] == ()
    assert listeners.find(Counts) is listeners.get(Counts) is counts
    listeners.remove(counts)
    assert listeners.hearing["after_step"] == ()
    assert listeners.find(Counts) is None
