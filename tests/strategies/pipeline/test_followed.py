"""The calls of a forward, and what forward does beside calling."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet.strategies.pipeline.split import Followed


class Acting(nn.Module):
    """A layer around which forward does ``act(self, x)``."""

    def __init__(self, act: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.act, self.count = nn.Linear(2, 2), act, 1000
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self, self.layer(x))
        return out


def counting(model: Any, x: Any) -> Any:
    model.count += 1
    return x


def summing(model: Any, x: Any) -> Any:
    model.seen += 1
    return x


def replacing(model: Any, x: Any) -> Any:
    model.seen = model.seen + 1
    return x


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda model, x: x + torch.randn(2), "draws random numbers"),
        (lambda model, x: x if random.random() < 0.5 else -x, "draws random numbers"),
        (counting, "changes the attribute 'count' of Acting"),
        (summing, "changes the buffer 'seen'"),
        (replacing, "changes the buffer 'seen'"),
    ],
)
def test_what_would_be_done_once_is_refused(act: Callable[[Any, Any], Any], reason: str) -> None:
    """It would be done while forward is followed, and in no step; buffers and random streams stay as they were."""
    model = Acting(act)
    drawn = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match=f"{reason}.*once and not in each step"):
        Followed(model, True)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert torch.equal(model.seen, torch.zeros(2))


def test_a_tensor_made_of_nothing_is_a_constant() -> None:
    """torch.fx keeps it in the model, where it would be a new name; here the model stays as it was."""
    model = Acting(lambda model, x: x * torch.full((2,), 3.0) + torch.ones(2))
    before = set(vars(model))
    modes = [Followed(model, mode) for mode in (True, False)]
    assert modes[0].calls == modes[1].calls
    assert sorted(value.sum().item() for value in modes[0].constants.values()) == [2.0, 6.0]
    assert set(vars(model)) == before
