"""A listener hears what a job does, and costs nothing at the points that it does not override."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet.job.listener import HOOKS, Listener, Listeners
from tests.helpers.fleets import own_fleet


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
    model.state_dict()
    own.session.close()
    wrapping = ["before_wrap", "model_wrapped", "optimizer_unwrapped", "optimizer_wrapped"]
    step = ["before_forward", "forward_begins", "forward_ends", "before_step", "after_update", "after_step"]
    assert heard == [*wrapping, *step, "gradients_cleared", "before_save", "close"]


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
