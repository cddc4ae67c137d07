"""build_strategy: the two switches that act (A.4), against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.strategies import plan
from fleet.strategies._declare.strategy_plan import remarks
from fleet.strategies.build_strategy import FusedUpdate, form_of
from fleet.strategies.to_static import ToStatic


class OwnAdam(torch.optim.Adam):
    """Keeps torch's step."""


class OwnStep(torch.optim.Adam):
    """Has a step of its own, which knows nothing of ``fused``."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Plain(torch.optim.Optimizer):
    """An optimizer with neither form."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        return None


def start(make: Any, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    strategy = fleet.DistributedStrategy()
    strategy.update({"build_strategy": {"fuse_all_optimizer_ops": True}, **(options or {})})
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inner = make(net.parameters())
    return fleet.distributed_model(net), fleet.distributed_optimizer(inner)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "own_adam": lambda p: OwnAdam(p, lr=0.01),
    "own_step": lambda p: OwnStep(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
FOREACH = {"own_step", "rmsprop"}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_user_s_optimizer_uses_one_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A.4 fuse_all_optimizer_ops: the form is set, the kernel really runs, and the numbers are those of single ones."""
    model, optimizer = start(KINDS[kind])
    key = "foreach" if kind in FOREACH else "fused"
    assert all(group[key] is True for group in optimizer.param_groups)
    assert all(not group.get("fused" if key == "foreach" else "foreach") for group in optimizer.param_groups)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        train(model, optimizer, range(1))
    names = {event.key for event in seen.key_averages()}
    assert any(name.startswith(f"aten::_{key}_") for name in names), names
    train(model, optimizer, range(1, 6))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = KINDS[kind](net.parameters())
    for group in plain.param_groups:
        group["foreach"] = False
    train(net, plain, range(6))
    torch.testing.assert_close(model.state_dict(), net.state_dict(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad", "rmsprop"])
def test_states_go_both_ways(kind: str) -> None:
    """A.4 fuse_all_optimizer_ops: a state of single updates continues fused, and the other way round."""
    model, optimizer = start(KINDS[kind])
    train(model, optimizer, range(3))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = KINDS[kind](net.parameters())
    train(net, plain, range(3))
    mine, theirs = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain.state_dict())
    optimizer.load_state_dict(theirs)
    key = "foreach" if kind in FOREACH else "fused"
    assert all(group[key] is True for group in optimizer.param_groups)
    train(model, optimizer, range(3, 6))
    plain.load_state_dict(mine)
    train(net, plain, range(3, 6))
    torch.testing.assert_close(model.state_dict(), net.state_dict(), atol=1e-6, rtol=1e-5)


def test_a_parameter_may_be_used_late() -> None:
    """A.4 fuse_all_optimizer_ops: some parameters have momentum, and others get their first gradient."""
    net = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    plain = copy.deepcopy(net)
    for layers, fuse in ((plain, False), (net, True)):
        optimizer: Any = torch.optim.SGD(layers.parameters(), 0.1, momentum=0.9)
        if fuse:
            strategy = fleet.DistributedStrategy()
            strategy.build_strategy.fuse_all_optimizer_ops = True
            fleet.init(is_collective=True, strategy=strategy)
            optimizer = fleet.distributed_optimizer(optimizer)
        for number in range(4):
            optimizer.zero_grad()
            sum(layer(torch.ones(1, 3)).square().sum() for layer in layers[: 1 + number // 2]).backward()
            optimizer.step()
        assert not fuse or optimizer.param_groups[0]["fused"]
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


def test_a_new_group_is_fused_too() -> None:
    """A.4 fuse_all_optimizer_ops: groups that come later, and a scheduler that holds the user's optimizer."""
    model, optimizer = start(KINDS["adam"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.user_optimizer, 1, gamma=0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    train(model, optimizer, range(1))
    scheduler.step()
    assert optimizer.get_lr() == 0.005


def test_what_cannot_be_fused_is_refused() -> None:
    """A.4 fuse_all_optimizer_ops: no such form, or the user's own contrary setting."""
    for make, message in (
        (Plain, "Plain has neither a fused nor a foreach form"),
        (lambda p: torch.optim.Adam(p, fused=False), "made with fused=False"),
        (lambda p: torch.optim.RMSprop(p, foreach=False), "made with foreach=False"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(make)
    assert form_of(torch.optim.Adam([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])) == "foreach"


def test_divided_parameters_use_foreach() -> None:
    """A.4 fuse_all_optimizer_ops: with sharding, whose parameters most fused kernels do not take."""
    _, optimizer = start(KINDS["sgd"], {"sharding": True, "sharding_configs": {"sharding_degree": 1}})
    assert [(group["foreach"], group["fused"]) for group in optimizer.param_groups] == [(True, None)]


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_rules_of_their_own_are_remarked(name: str) -> None:
    """A.4 fuse_all_optimizer_ops: lars and lamb replace the update, so the option has nothing to act on."""
    strategy = fleet.DistributedStrategy()
    strategy.update({"build_strategy": {"fuse_all_optimizer_ops": True}, name: True})
    assert any("changes nothing while" in note and name in note for note in plan(strategy, 1).notes)


def test_no_conflict_with_fused_all_reduce() -> None:
    """A.4: Paddle turned one of the two off; here both are on."""
    strategy = fleet.DistributedStrategy()
    strategy.build_strategy.fuse_all_optimizer_ops = True
    assert strategy.fuse_all_reduce_ops is True
    made = plan(strategy, 2)
    assert [step.name for step in made.steps] == ["data_parallel", "build_strategy"]
    assert made.notes == ()
    assert not FusedUpdate.chosen(fleet.DistributedStrategy())


def test_a_server_job_says_that_it_changes_nothing() -> None:
    """A.4, A.5: servers update there, and the option is remarked, not dropped."""
    strategy = fleet.DistributedStrategy()
    assert not any("build_strategy" in note for note in remarks(strategy, (), 2, collective=False))
    strategy.build_strategy.fuse_all_optimizer_ops = True
    notes = remarks(strategy, (), 2, collective=False)
    assert any(note.startswith("build_strategy was set and changes nothing") for note in notes)


def test_cuda_graphs_need_the_compiler() -> None:
    """A.4 allow_cuda_graph_capture: refused without to_static and with a mode that records none; noted on the CPU."""
    strategy = fleet.DistributedStrategy()
    strategy.build_strategy.allow_cuda_graph_capture = True
    with pytest.raises(ConfigError, match="Set to_static to True as well"):
        plan(strategy, 1)
    strategy.to_static = True
    remark = "allow_cuda_graph_capture changes nothing on the CPU"
    assert any(remark in note for note in plan(strategy, 1).notes) != torch.cuda.is_available()
    strategy.to_static_configs = {"mode": "max-autotune-no-cudagraphs"}
    with pytest.raises(ConfigError, match="records none"):
        plan(strategy, 1)


@pytest.mark.parametrize(
    ("mode", "capture", "expected"),
    [
        ("default", False, None),
        ("default", True, "reduce-overhead"),
        ("max-autotune", True, "max-autotune"),
        ("reduce-overhead", False, "reduce-overhead"),
    ],
)
def test_cuda_graphs_set_the_mode(
    mode: str, capture: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A.4 allow_cuda_graph_capture: to_static compiles in a mode that records graphs."""
    asked: dict[str, Any] = {}

    def compiled(model: nn.Module, **settings: Any) -> nn.Module:
        asked.update(settings)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    strategy = fleet.DistributedStrategy()
    strategy.to_static = True
    strategy.to_static_configs = {"mode": mode}
    strategy.build_strategy.allow_cuda_graph_capture = capture
    fleet.init(is_collective=True, strategy=strategy)
    fleet.distributed_model(nn.Linear(2, 2))
    assert ToStatic.name in str(plan(strategy, 1))
    # On a CPU the mode comes as its options, with one of ours.
    modes = torch._inductor.list_mode_options(expected or "default")
    assert asked["options"] == {**modes, "layout_optimization": False}
