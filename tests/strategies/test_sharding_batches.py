"""Several batches for one exchange: what is counted, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import ConfigError
from fleet.strategies._sharding_batches import Batches, CountingOptimizer


def backward(batches: Batches, outputs: int = 1) -> None:
    """Runs one backward pass through a number of outputs."""
    x = torch.ones(2, requires_grad=True)
    made = [x * (place + 1) for place in range(outputs)]
    batches.watch({"all": made})
    torch.stack(made).sum().backward()


def test_counting() -> None:
    """A.2 accumulate_steps: a backward pass through several outputs counts once; step() needs all of them."""
    batches = Batches(per_exchange=2)
    optimizer = CountingOptimizer(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), batches, in_model=True)
    assert not batches.is_last
    backward(batches, outputs=3)
    assert batches.backwards == 1
    assert batches.is_last
    assert "1 batches wait" in str(optimizer.saving_note())
    for call in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(ConfigError, match="accumulate_steps"):
            call()
    backward(batches)
    assert optimizer.has_new_gradients()
    optimizer.step()
    assert not optimizer.has_new_gradients()
    assert optimizer.saving_note() is None
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_steps_between_updates() -> None:
    """A.2 gradient_merge_acc_step: every third call updates, and schedulers see every call."""
    parameter = torch.zeros(1, requires_grad=True)
    inner = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 100)
    optimizer = CountingOptimizer(inner, Batches(per_update=3), in_model=True)
    seen = []
    for _ in range(6):
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()  # warns when the optimizer did not step before
        seen.append(parameter.item())
    assert seen == [0, 0, -1, -1, -1, -2]
