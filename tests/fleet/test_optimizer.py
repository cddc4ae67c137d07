"""FleetOptimizer is a torch optimizer with Fleet's calls beside torch's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fleet._optimizer import FleetOptimizer
from fleet.errors import ConfigError


class Observer:
    """Stands for the session."""

    def __init__(self) -> None:
        self.steps = 0

    def before_step(self) -> None:
        self.steps += 1

    def after_step(self) -> None:
        """Has nothing to note."""


def made(net: nn.Module, **settings: Any) -> FleetOptimizer:
    """Returns SGD in a FleetOptimizer."""
    inner = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **settings})
    return FleetOptimizer(inner, Observer(), inner)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def loss_of(net: nn.Module) -> torch.Tensor:
    return net(torch.ones(2, 4)).square().mean()


def test_is_a_torch_optimizer_and_schedulers_drive_it(net: nn.Module) -> None:
    """isinstance holds; StepLR changes the rate that the inner optimizer uses."""
    optimizer = made(net)
    assert isinstance(optimizer, Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loss_of(net).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.get_lr() == 0.05
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    ],
    ids=["cosine", "one-cycle", "plateau", "lambda"],
)
def test_schedulers_work_without_warning(net: nn.Module, make: Any) -> None:
    """Every kind of scheduler accepts the wrapped optimizer and sees its steps."""
    optimizer = made(net, momentum=0.9)
    scheduler = make(optimizer)
    loss_of(net).backward()
    optimizer.step()
    scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))


def test_both_loops_give_the_same_numbers(net: nn.Module) -> None:
    """003-32: step/zero_grad, minimize/clear_grad and the static idiom (no backward) end at the same weights."""
    start = {k: v.clone() for k, v in net.state_dict().items()}
    ends = []
    for loop in ("torch", "fleet", "static"):
        net.load_state_dict(start)
        optimizer = made(net, momentum=0.9)
        optimizer.zero_grad()
        for _ in range(3):
            loss = loss_of(net)
            if loop != "static":
                loss.backward()
            if loop == "torch":
                optimizer.step()
                optimizer.zero_grad()
            else:
                _, pairs = optimizer.minimize(loss)
                assert len(pairs) == 4
                optimizer.clear_gradients() if loop == "fleet" else optimizer.clear_grad()
        ends.append({k: v.clone() for k, v in net.state_dict().items()})
    for end in ends[1:]:
        for name, value in ends[0].items():
            torch.testing.assert_close(end[name], value, atol=0, rtol=0)


def test_minimize_never_runs_a_second_backward(net: nn.Module) -> None:
    """002-04: after the user's backward, minimize uses the gradients that are there (torch would raise otherwise)."""
    optimizer = made(net)
    loss = loss_of(net)
    loss.backward()
    before = net[0].weight.grad.clone()
    optimizer.minimize(loss)
    torch.testing.assert_close(net[0].weight.grad, before)


def test_minimize_runs_backward_after_gradients_were_zeroed_in_place(net: nn.Module) -> None:
    """G7: gradients that a clear filled with zeros are not new gradients."""
    optimizer = made(net)
    loss_of(net).backward()
    optimizer.clear_grad(set_to_zero=True)
    weight = net[0].weight.clone()
    optimizer.minimize(loss_of(net))
    assert not torch.equal(weight, net[0].weight)


def test_minimize_restricts_the_update(net: nn.Module) -> None:
    """B.4: parameter_list and no_grad_set restrict the update; the other gradients stay."""
    optimizer = made(net)
    loss_of(net).backward()
    first, second = net[0].weight.clone(), net[1].weight.clone()
    optimizer.minimize(loss_of(net), parameter_list=net[1].parameters(), no_grad_set=[net[1].bias])
    assert torch.equal(net[0].weight, first)
    assert not torch.equal(net[1].weight, second)
    assert net[0].weight.grad is not None
    with pytest.raises(ConfigError, match="takes the loss tensor"):
        optimizer.minimize("loss")  # type: ignore[arg-type]


def test_state_pickles_and_round_trips(net: nn.Module) -> None:
    """The state pickles; another wrapped or plain optimizer continues from it exactly; 'epoch' is left alone."""
    optimizer = made(net, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss_of(net).backward()
    optimizer.step()
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    other = made(net, momentum=0.9)
    other.set_state_dict({**state, "epoch": 4})
    buffer = other.state[net[0].weight]["momentum_buffer"]
    torch.testing.assert_close(buffer, optimizer.state[net[0].weight]["momentum_buffer"])
    torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9).load_state_dict(state)
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.get_lr() == optimizer.get_lr()


def test_learning_rate_calls(net: nn.Module) -> None:
    """set_lr sets every group; a wrong value raises and changes nothing."""
    optimizer = made(net)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.7})
    optimizer.set_lr(0.25)
    assert [g["lr"] for g in optimizer.optimizer.param_groups] == [0.25, 0.25]
    for wrong in (-1, "0.1", True):
        with pytest.raises(ConfigError, match="at least 0"):
            optimizer.set_lr(wrong)  # type: ignore[arg-type]
    assert optimizer.get_lr() == 0.25


def test_hooks_and_closures_reach_the_inner_optimizer(net: nn.Module) -> None:
    """A step hook runs at each step; a closure is evaluated by the inner optimizer."""
    optimizer = made(net)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert seen == [1]


def test_grad_scaler_accepts_it(net: nn.Module) -> None:
    """An explicit GradScaler unscales and steps the wrapped optimizer, and skips on an infinite gradient."""
    optimizer = made(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = net[0].weight.clone()
    scaler.scale(loss_of(net)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, net[0].weight)
    before = net[0].weight.clone()
    optimizer.zero_grad()
    (scaler.scale(loss_of(net)) * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(before, net[0].weight)
