"""The session wraps in plan order, refuses before it changes anything, and lets go of what strategies hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import ConfigError, OptionWarning
from fleet.job.job import Job
from fleet.job.session import Session
from fleet.job.start import new_session
from fleet.options import DistributedStrategy
from fleet.role_maker import UserDefinedRoleMaker
from fleet.role_maker.record import RoleRecord
from fleet.strategies._declare.strategy import Strategy
from fleet.strategies._declare.strategy_plan import plan
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper


def session_with(world_size: int = 1, **options: Any) -> Session:
    """Returns a session of this process alone, with ``options`` assigned; no process group."""
    strategy = DistributedStrategy()
    strategy.update(options)
    record = RoleRecord(world_size=world_size)
    job = Job(record=record, device=torch.device("cpu"), options=strategy, say=print)
    return new_session(job, UserDefinedRoleMaker(is_collective=True), plan(strategy, world_size))


def test_optimizer_strategies_nest_in_plan_order() -> None:
    """A.7: gradient_merge is outside lars, so that lars sees merged gradients."""
    session = session_with(lars=True, gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    assert [s.name for s in session.strategies] == ["lars", "gradient_merge"]
    net = nn.Linear(2, 2)
    wrapped = session.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    kinds = []
    chain: Any = wrapped
    while isinstance(chain, OptimizerWrapper):
        kinds.append(type(chain).__name__)
        chain = chain.optimizer
    assert kinds == ["FleetOptimizer", "AccumulatingOptimizer", "LarsMomentum"]
    assert chain is wrapped.user_optimizer


def test_a_refused_optimizer_leaves_nothing_behind() -> None:
    """A strategy that refuses the optimizer raises before anything is wrapped."""
    session = session_with(lars=True)
    with pytest.raises(ConfigError, match="momentum"):
        session.wrap_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    assert session.optimizers == []


def test_training_without_the_optimizer_is_an_error() -> None:
    """003-22: an option that acts in the optimizer is never ignored because distributed_optimizer was forgotten."""
    session = session_with(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model = session.wrap_model(nn.Linear(2, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(ConfigError, match="gradient_merge acts in the optimizer"):
        model(torch.ones(1, 2))


def test_renaming_strategies_are_caught() -> None:
    """Style: parameter names are compared before and after each strategy, from outside."""
    session = session_with()

    class Renaming(Strategy):
        name = "renaming_in_test_session"
        meaning = "Renames."
        stage = 0  # type: ignore[assignment]

        def wrap_model(self, model: nn.Module) -> nn.Module:
            return nn.Sequential(model)

    from fleet.strategies._declare.strategy import REGISTRY

    del REGISTRY[Renaming.name]  # not by monkeypatch, which would put it back
    session.strategies = [Renaming(None, session.job)]
    with pytest.raises(ConfigError, match="'renaming_in_test_session' renamed parameters.*'weight' is '0.weight' now"):
        session.wrap_model(nn.Linear(1, 1))


def test_close_lets_go_of_the_loss_watcher() -> None:
    """adaptive_localsgd watches torch.autograd.backward only while its session lives."""
    original = torch.autograd.backward
    session = session_with(adaptive_localsgd=True)
    session.wrap_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    assert torch.autograd.backward is not original
    session.close()
    assert torch.autograd.backward is original


def test_parameter_names_and_saving() -> None:
    """Names come from every wrapped model; saving asks every optimizer for its note."""
    session = session_with()
    net = nn.Sequential(nn.Linear(1, 2))
    session.wrap_model(net)
    optimizer = session.wrap_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    assert session.job.parameter_names()[net[0].bias] == "0.bias"
    session.job.before_save()
    optimizer.saving_note = lambda: "half a truth"  # type: ignore[method-assign]
    with pytest.warns(OptionWarning, match="half a truth"):
        session.job.before_save()


def test_a_model_without_numbers_is_refused() -> None:
    """A module on the device 'meta' failed in its first forward, with torch's text."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2))
    session = session_with()
    with pytest.raises(ConfigError, match="'0.weight' is on the device 'meta'.*to_empty"):
        session.wrap_model(net)
    session.wrap_model(net.to_empty(device="cpu"))
