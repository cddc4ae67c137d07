"""a_sync: modes, remarks and refusals, and the optimizer whose step goes to servers (A.2, D.7, 002-16)."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleet.errors import CheckpointError, ConfigError, NotInitializedError
from fleet.job.job import Job
from fleet.job.start import new_session
from fleet.options import DistributedStrategy
from fleet.paddle.strategy_factory import StrategyFactory
from fleet.role_maker import UserDefinedRoleMaker
from fleet.role_maker.record import RoleRecord
from fleet.strategies._declare.strategy_plan import plan
from fleet.strategies._shared.served_optimizer import SERVERS, ServedOptimizer
from fleet.strategies.a_sync import ASync, is_hybrid, ps_mode


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
        self.plan = SimpleNamespace(sparse=[])
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


def test_plain_sgd_is_stepped_here_as_torch_steps_it() -> None:
    """Bit for bit, whatever kind of gradient there is; a group without any and a frozen parameter stay."""
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7), torch.randn(4, 2), torch.randn(2)]
    sparse = torch.sparse_coo_tensor([[1, 1, 3]], torch.randn(3, 2), (4, 2), check_invariants=True)
    gradients = [torch.randn(5, 3), None, sparse, None]
    found = []
    for served in (False, True):
        weights = [nn.Parameter(values.clone()) for values in start]
        groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.7}]
        inner = torch.optim.SGD(groups, 0.3)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        ServedOptimizer(inner).train_here() if served else inner.step()
        assert [weight._version for weight in weights] == [1, 0, 1, 0]
        found.append([weight.detach() for weight in weights])
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)


def test_who_looks_at_steps_sees_those_that_are_taken_here() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], 0.1)
    served, seen = ServedOptimizer(inner), []
    weight.grad = torch.ones(2)
    handle = register_optimizer_step_post_hook(lambda *args: seen.append("hook"))
    served.train_here()
    handle.remove()
    with torch.profiler.profile() as profile:
        served.train_here()
    seen += {event.key for event in profile.key_averages() if event.key.startswith("Optimizer.step")}
    served.train_here()
    step = inner.step
    inner.step = lambda: (seen.append("replaced"), step())[1]  # type: ignore[method-assign]
    served.train_here()
    assert seen == ["hook", "Optimizer.step#SGD.step", "replaced"]
    assert weight.tolist() == pytest.approx([0.6, 0.6])


@pytest.mark.parametrize("keeps_name", [False, True])
def test_a_step_that_is_replaced_on_the_class_is_taken(monkeypatch: pytest.MonkeyPatch, keeps_name: bool) -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    served, own = ServedOptimizer(torch.optim.SGD([weight], 0.1)), torch.optim.SGD.step
    weight.grad = torch.ones(2)
    served.train_here()

    def step(self: Any, closure: Any = None) -> Any:
        seen.append("replaced")
        return own(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", functools.wraps(own)(step) if keeps_name else step)
    served.train_here()
    monkeypatch.undo()
    served.train_here()
    assert seen == ["replaced"]
    assert weight.tolist() == pytest.approx([0.7, 0.7])


def test_gradients_are_cleared_as_the_optimizer_clears_them() -> None:
    """With None or zeros; by the optimizer's own way where it has one; and the profiler shows it."""
    weight, seen = nn.Parameter(torch.ones(2)), []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            seen.append(set_to_none)

    inner = torch.optim.SGD([weight], 0.1)
    served = ServedOptimizer(inner)
    weight.grad = torch.ones(2)
    served.zero_grad(set_to_none=False)
    assert weight.grad.tolist() == [0, 0]
    served.zero_grad()
    assert weight.grad is None
    with torch.profiler.profile() as profile:
        served.zero_grad()
    assert any(event.key == "Optimizer.zero_grad#SGD.zero_grad" for event in profile.key_averages())
    ServedOptimizer(Own([weight], 0.1)).zero_grad()
    inner.zero_grad = lambda set_to_none: seen.append("replaced")  # type: ignore[method-assign]
    served.zero_grad()
    assert seen == [True, "replaced"]


def test_moments_of_a_local_run_are_refused_where_servers_keep_them() -> None:
    """D.3: loaded into the worker they would be ignored; hybrid workers step with them."""
    weight = nn.Parameter(torch.ones(2))
    local = torch.optim.Adam([weight])
    weight.grad = torch.ones(2)
    local.step()
    state = local.state_dict()
    with pytest.raises(CheckpointError, match="moments of 1 parameter"):
        ServedOptimizer(torch.optim.Adam([weight])).load_state_dict(state)
    ServedOptimizer(torch.optim.Adam([weight])).load_state_dict({**state, "state": {}})
    hybrid = ServedOptimizer(torch.optim.Adam([weight]), hybrid=True)
    hybrid.load_state_dict(state)
    assert hybrid.state_dict()["state"]


@pytest.mark.parametrize("other", [False, True])
def test_one_optimizer_per_job(other: bool) -> None:
    """Adopting the strategy of the second one does not make the job forget the first."""
    found = StrategyFactory.create_sync_strategy()
    record = RoleRecord(world_size=2)
    made = Job(record=record, collective=False, device=torch.device("cpu"), options=found, say=print)
    job = new_session(made, UserDefinedRoleMaker(is_collective=False), plan(found, 2, collective=False))
    first = job.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))

    def second() -> None:
        job.adopt(StrategyFactory.create_async_strategy() if other else found)
        job.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))

    with pytest.raises(ConfigError, match="one optimizer"):
        second()
    assert job.optimizers == [first]


def test_one_optimizer_in_a_single_process_that_starts_its_server() -> None:
    found = DistributedStrategy()
    made = Job(record=RoleRecord(), device=torch.device("cpu"), options=found, say=print)
    job = new_session(made, UserDefinedRoleMaker(is_collective=True), plan(found, 1))
    for _ in range(2):
        job.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    with pytest.raises(ConfigError, match="one optimizer"):
        job.become_served()


def hybrid(mode: str = "sync", dp_degree: int = 2, **options: Any) -> DistributedStrategy:
    strategy = getattr(StrategyFactory, f"create_{mode}_strategy")()
    strategy.hybrid_configs = {"dp_degree": dp_degree}
    for name, value in options.items():
        setattr(strategy, name, value)
    return strategy


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_hybrid_is_chosen_by_the_degree_of_data_parallelism(mode: str) -> None:
    """D.9: dp_degree of all workers; the default, or another number, is said to change nothing."""
    assert is_hybrid(hybrid(mode), 2)
    assert plan(hybrid(mode), 2, collective=False).notes == ()
    assert not is_hybrid(DistributedStrategy(), 2)
    for other in (-1, 1):
        assert not is_hybrid(hybrid(mode, other), 2)
        (note,) = plan(hybrid(mode, other), 2, collective=False).notes
        assert "Set its dp_degree to the number of workers, 2" in note
    assert is_hybrid(hybrid(mode, 1), 1)  # the same script alone, with fleet.worker_num() for the degree


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (hybrid("geo"), "mode is geo, in which no worker waits"),
        (hybrid("half_async"), "mode is half_async, in which no worker waits"),
        (hybrid(adam_d2sum=True), "adam_d2sum is a rule of servers"),
        (hybrid(hybrid_configs={"sharding_degree": 2}), r"hybrid_configs\['sharding_degree'\] is 2"),
        (hybrid(dgc=True, gradient_merge=True), "dgc, gradient_merge would act on the dense half"),
        (hybrid(asp=True), "asp would not mask weights"),
        (hybrid(a_sync_configs={"use_ps_gpu": 1}), r"set hybrid_configs\['dp_degree'\] to the number of workers"),
    ],
)
def test_hybrid_refuses_what_it_excludes(made: DistributedStrategy, match: str) -> None:
    """D.9, decision 5: each with its reason."""
    with pytest.raises(ConfigError, match=match):
        plan(made, 2, collective=False)


def test_a_hybrid_step_leaves_hooks_to_the_optimizer() -> None:
    """B.3: grad_clip and other hooks see the mean, inside the trainer's step."""
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    served, trainer, seen = ServedOptimizer(inner, hybrid=True), Trainer(), []
    inner.register_step_pre_hook(lambda *args: seen.append("before"))
    served.connect(trainer)  # type: ignore[arg-type]
    served.step()
    assert trainer.calls == ["step"]
    assert seen == []
    inner.step()
    assert seen == ["before"]


def test_hybrid_needs_rules_for_rows_only() -> None:
    """D.9: dense parameters stay here, so any optimizer trains them; rows need a rule of the servers."""
    from fleet.ps import SparseEmbedding

    session: Any = SimpleNamespace(options=hybrid(), world_size=2, optimizers=[])
    strategy = ASync(session.options["a_sync_configs"], session)
    strategy.check_optimizer(torch.optim.RMSprop([nn.Parameter(torch.zeros(1))], 0.1))
    with pytest.raises(ConfigError, match="RMSprop"):
        strategy.check_optimizer(torch.optim.RMSprop(SparseEmbedding(2).parameters(), 0.1))
