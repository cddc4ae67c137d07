"""a_sync: modes, remarks and refusals, and the optimizer whose step goes to servers (A.2, D.7, 002-16)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fleet._strategy_factory import StrategyFactory
from fleet.errors import CheckpointError, ConfigError, NotInitializedError
from fleet.options import DistributedStrategy
from fleet.strategies._plan import plan
from fleet.strategies._served_optimizer import SERVERS, ServedOptimizer
from fleet.strategies.a_sync import ASync, ps_mode


def test_the_factory_makes_the_four_modes() -> None:
    """B.13: half-async is the factory's alone."""
    made = {
        "sync": StrategyFactory.create_sync_strategy(),
        "half_async": StrategyFactory.create_half_async_strategy(),
        "async": StrategyFactory.create_async_strategy(),
        "geo": StrategyFactory.create_geo_strategy(10),
    }
    assert {mode: ps_mode(strategy) for mode, strategy in made.items()} == {mode: mode for mode in made}
    with pytest.raises(ConfigError, match="1 or more"):
        StrategyFactory.create_geo_strategy(0)


def test_queue_keys_are_remarked_where_there_are_no_queues() -> None:
    """A.2: a key that changes nothing in a mode is said to."""
    strategy = StrategyFactory.create_sync_strategy()
    strategy.a_sync_configs = {"send_queue_size": 4}
    assert "send_queue_size" in plan(strategy, 2, collective=False).notes[0]
    strategy.a_sync = True
    assert plan(strategy, 2, collective=False).notes == ()
    assert "was not set" in plan(DistributedStrategy(), 2, collective=False).notes[0]


class Trainer:
    """Records what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state: dict[str, Any] = {"step": 5}

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def has_gradients(self) -> bool:
        return True


def test_steps_go_to_the_trainer() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], 0.1)
    served, trainer, seen = ServedOptimizer(inner), Trainer(), []
    inner.register_step_pre_hook(lambda *args: seen.append("before"))
    inner.register_step_post_hook(lambda *args: seen.append("after"))
    with pytest.raises(NotInitializedError, match="init_worker"):
        served.step()
    served.load_state_dict({**served.state_dict(), SERVERS: {"step": 2}})
    served.connect(trainer)  # type: ignore[arg-type]
    assert trainer.state == {"step": 2}
    weight.grad = torch.ones(2)
    assert served.step(lambda: 3.0) == 3.0
    assert weight.tolist() == [1, 1]
    assert seen == ["before", "after"]
    assert served.has_new_gradients()
    served.zero_grad()
    assert trainer.calls == ["step", "drop_gradients"]
    assert served.state_dict()[SERVERS] == {"step": 2}
    with pytest.raises(CheckpointError, match="not one of this package"):
        served.load_state_dict({**inner.state_dict(), SERVERS: 3})
    weight.grad = torch.ones(2)
    served.train_here()
    assert weight.tolist() == pytest.approx([0.9, 0.9])
    assert seen == ["before", "after"]


def test_one_optimizer_per_job() -> None:
    session: Any = SimpleNamespace(options=StrategyFactory.create_sync_strategy())
    strategy = ASync(session.options["a_sync_configs"], session)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    strategy.check_optimizer(optimizer)
    strategy.wrap_optimizer(optimizer)
    with pytest.raises(ConfigError, match="one optimizer"):
        strategy.check_optimizer(optimizer)
