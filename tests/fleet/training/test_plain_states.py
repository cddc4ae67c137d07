from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet import fleet
from fleet.errors import CheckpointError


@pytest.mark.parametrize("name", ["set_state_dict", "set_dict", "load_dict"])
def test_a_plain_module_loads_what_the_wrapped_one_saved(name: str) -> None:
    """Issue 37, 1: the elastic guide loads before distributed_model(); its except hid that there was no method."""
    fleet.init(is_collective=True, log_level="ERROR")
    state = fleet.distributed_model(nn.Linear(4, 3)).state_dict()
    state["epoch"] = 2
    plain: Any = nn.Linear(4, 3)
    getattr(plain, name)(state)
    assert torch.equal(plain.weight, state["weight"])
    with pytest.raises(CheckpointError, match="does not have: \\['extra'\\]"):
        getattr(plain, name)({**state, "extra": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        getattr(plain, name)({"epoch": 2, "weight": state["weight"]})


def test_a_plain_optimizer_loads_beside_an_epoch() -> None:
    assert fleet.load
    first, second = (torch.optim.SGD(nn.Linear(2, 1).parameters(), rate, momentum=0.9) for rate in (0.1, 0.2))
    second.set_state_dict({**first.state_dict(), "epoch": 2})
    assert second.param_groups[0]["lr"] == 0.1


def test_a_module_keeps_methods_of_its_own() -> None:
    class Own(nn.Module):
        def set_dict(self, state: object) -> object:
            return state

    assert fleet.load
    assert Own().set_dict(7) == 7
