"""OptimizerWrapper is a torch optimizer that forwards everything to the one inside."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, innermost, wrapper_in
from fleet.strategies.sharding.owners import PartitionedOptimizer


def test_shares_groups_and_state() -> None:
    """Groups, state, defaults and hooks are the inner optimizer's own, also through two wrappers."""
    net = nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wrapper = OptimizerWrapper(OptimizerWrapper(inner))
    assert isinstance(wrapper, Optimizer)
    assert wrapper.param_groups is inner.param_groups
    assert wrapper.state is inner.state
    assert wrapper.defaults is inner.defaults
    seen: list[str] = []
    wrapper.register_step_pre_hook(lambda *_: seen.append("before"))
    net(torch.ones(1, 2)).sum().backward()
    wrapper.step()
    assert seen == ["before"]
    assert wrapper.state_dict().keys() == inner.state_dict().keys()
    wrapper.zero_grad()
    assert net.weight.grad is None
    wrapper.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(wrapper.parameters()) == 3
    assert wrapper.saving_note() is None
    assert not wrapper.has_new_gradients()


def test_schedulers_of_the_inner_optimizer_hear_of_steps() -> None:
    """A scheduler made before wrapping is told of a step that never called the inner optimizer."""
    net = nn.Linear(2, 1)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)
    OptimizerWrapper(inner).note_step()
    scheduler.step()  # warns, which is an error in the tests, when it has heard of no step
    assert inner.param_groups[0]["lr"] < 0.1


def test_a_wrapper_is_found_by_its_class() -> None:
    """A plain optimizer has none, and is its own innermost one."""
    plain = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    assert wrapper_in(plain, PartitionedOptimizer) is None
    outer = OptimizerWrapper(OptimizerWrapper(plain))
    assert wrapper_in(outer, OptimizerWrapper) is outer
    assert wrapper_in(outer, PartitionedOptimizer) is None
    assert innermost(outer) is innermost(plain) is plain
