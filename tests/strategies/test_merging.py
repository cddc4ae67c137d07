"""Window and MergingOptimizer: what gradient_merge and stage 1 of sharding count by."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import CheckpointError
from fleet.strategies._merging import MergingOptimizer, Window


def made(k_steps: int, global_rank: int = 0) -> tuple[torch.Tensor, MergingOptimizer]:
    """Returns a parameter and an optimizer of rate 1 that merges."""
    parameter = torch.zeros(1, requires_grad=True)
    window = Window(k_steps, average=True)
    return parameter, MergingOptimizer(torch.optim.SGD([parameter], lr=1.0), window, global_rank, "sharding")


def step(parameter: torch.Tensor, optimizer: MergingOptimizer, gradient: float) -> None:
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
