"""Functions around backward see every call, are taken off in any order, and leave torch as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fleet.strategies._shared.backward_calls import watch_losses, wrap_backward


def test_sees_scalars_until_stopped() -> None:
    """A.8 adaptive: both ways of calling backward are seen; tensors that are no loss are not."""
    original = torch.autograd.backward
    seen: list[torch.Tensor] = []
    stop = watch_losses(lambda loss, gradient: seen.append(loss))
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (x * x).sum().backward()
    torch.autograd.backward([(x * 5).sum()])
    (x * 2).backward(torch.ones(2))
    stop()
    (x * 7).sum().backward()
    assert [loss.item() for loss in seen] == [13.0, 25.0]
    assert all(loss.grad_fn is not None for loss in seen)
    assert torch.autograd.backward is original
    torch.testing.assert_close(x.grad, torch.tensor([4.0 + 5 + 2 + 7, 6.0 + 5 + 2 + 7]))


@pytest.mark.parametrize("first", [0, 1])
def test_taken_off_in_any_order(first: int) -> None:
    """The job's listeners, amp and a marked method watch at once, and none of them ends last by rule."""
    original = torch.autograd.backward
    seen: list[str] = []

    def layer(call: Callable[..., Any], *args: Any, name: str, **kwargs: Any) -> None:
        seen.append(name)
        call(*args, **kwargs)

    stops = {name: wrap_backward(functools.partial(layer, name=name)) for name in ("amp", "mean")}
    x = torch.tensor(3.0, requires_grad=True)
    (x * x).backward()
    assert seen == ["mean", "amp"]
    names = sorted(stops, reverse=bool(first))
    stops[names[0]]()
    (x * x).backward()
    assert seen[2:] == names[1:]
    stops[names[1]]()
    assert torch.autograd.backward is original


def test_below_the_patch_of_another() -> None:
    """Where somebody patches torch after us, our patch stays below and does nothing."""
    original = torch.autograd.backward
    seen: list[float] = []
    stop = watch_losses(lambda loss, gradient: seen.append(loss.item()))
    below = torch.autograd.backward
    try:
        torch.autograd.backward = lambda *args, **kwargs: below(*args, **kwargs)
        stop()
        x = torch.tensor(3.0, requires_grad=True)
        (x * x).backward()
    finally:
        torch.autograd.backward = original
    assert x.grad == 6.0
    assert not seen


def test_the_patch_of_another_that_copies_our_attributes_stays() -> None:
    original = torch.autograd.backward
    stops = [watch_losses(lambda loss, gradient: None)]
    calls: list[str] = []
    ours = torch.autograd.backward

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append("theirs")
        ours(*args, **kwargs)

    try:
        torch.autograd.backward = theirs
        stops.append(watch_losses(lambda loss, gradient: calls.append("ours")))
        x = torch.tensor(3.0, requires_grad=True)
        (x * x).backward()
        for stop in stops:
            stop()
        assert torch.autograd.backward is theirs
        (x * x).backward()
    finally:
        torch.autograd.backward = original
    assert calls == ["ours", "theirs", "theirs"]
