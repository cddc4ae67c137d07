"""SetAside: what gradient_merge and stage 1 of sharding add gradients up in."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import CheckpointError
from fleet.strategies._gradients.accumulator import AccumulatingOptimizer
from fleet.strategies._gradients.set_aside import SetAside


def made(k_steps: int, global_rank: int = 0) -> tuple[torch.Tensor, AccumulatingOptimizer]:
    """Returns a parameter and an optimizer of rate 1 that merges."""
    parameter = torch.zeros(1, requires_grad=True)
    window = SetAside("sharding", per_update=k_steps, global_rank=global_rank)
    return parameter, AccumulatingOptimizer(torch.optim.SGD([parameter], lr=1.0), window)


def step(parameter: torch.Tensor, optimizer: AccumulatingOptimizer, gradient: float) -> None:
    """Runs one batch with a given gradient."""
    (parameter * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_open_window_is_saved_under_the_name_of_its_option() -> None:
    """A.7: resuming inside a window goes on exactly; another worker's window is refused, and named."""
    parameter, optimizer = made(3)
    step(parameter, optimizer, 3.0)
    state = optimizer.state_dict()
    assert state["sharding"]["batch"] == 1
    again, second = made(3)
    second.load_state_dict(state)
    step(again, second, 6.0)
    assert again.item() == 0.0
    step(again, second, 9.0)
    assert again.item() == pytest.approx(-6.0)
    _, other = made(3, global_rank=1)
    with pytest.raises(CheckpointError, match="a sharding window with rank 0, and this worker has 1"):
        other.load_state_dict(state)


def test_what_is_kept_is_what_gradients_would_hold_at_the_step() -> None:
    """Issue 9, 1.2: clearing before backward keeps every batch; clearing between backward and step drops one."""
    parameter, optimizer = made(4)
    for batch in (1.0, 2.0, 3.0, 4.0):
        loss = (parameter * batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert parameter.item() == -2.5
    for batch, clear in ((1.0, None), (2.0, "optimizer"), (3.0, "by hand"), (4.0, "zeros")):
        optimizer.zero_grad()
        (parameter * batch).sum().backward()
        if clear == "optimizer":
            optimizer.zero_grad()
        if clear == "by hand":
            parameter.grad = None
        if clear == "zeros":  # the last batch, with the sums of the others in .grad
            optimizer.zero_grad(set_to_none=False)
            (parameter * 7.0).sum().backward()
        optimizer.step()
    assert parameter.item() == -2.5 - (1.0 + 7.0) / 4


def test_clipping_in_an_open_window_has_something_to_clip() -> None:
    """Issue 9: clip_grad_value_ raises when no parameter has a gradient; the sum is out of its reach."""
    parameter, optimizer = made(2)
    for batch in (1.0, 2.0):
        optimizer.zero_grad()
        (parameter * batch).sum().backward()
        torch.nn.utils.clip_grad_value_([parameter], 1.25)
        optimizer.step()
    assert parameter.item() == -1.25


def test_grad_is_not_divided() -> None:
    """Issue 9, 1.9: torch.autograd.grad gives the gradient of its loss, in a window too, and takes no part in it."""
    parameter, optimizer = made(4)
    (parameter * 4.0).sum().backward()
    optimizer.step()
    assert torch.autograd.grad((parameter * 8.0).sum(), parameter)[0].item() == 8.0
    assert not optimizer.has_new_gradients()


def test_windows_of_two_optimizers_are_two() -> None:
    """Issue 9, 1.5: a loss that passes through another optimizer's parameters does not change its window's count."""
    (first, one), (second, two) = made(2), made(2)
    for batch in (1.0, 3.0):
        for parameter, optimizer in ((first, one), (second, two)):
            one.zero_grad()
            (first * second.detach() + second + parameter * (batch - 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # second: 1 + (batch - 1) in its own batches, and what came with the first's, as nobody cleared it in between
    assert second.item() == pytest.approx(-((1.0 + 1.0) + (1.0 + 3.0)) / 2)


def test_a_parameter_that_is_thawed_is_merged() -> None:
    """Issue 9, 1.7: from the step or clear after that."""
    parameter, frozen = torch.zeros(1, requires_grad=True), torch.zeros(1)
    window = SetAside("sharding", per_update=2)
    optimizer = AccumulatingOptimizer(torch.optim.SGD([parameter, frozen], lr=1.0), window)
    frozen.requires_grad_()
    optimizer.zero_grad()
    for batch in (1.0, 2.0):
        (parameter * batch + frozen * batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (parameter.item(), frozen.item()) == (-1.5, -1.5)
