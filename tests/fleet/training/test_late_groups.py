"""Parameter groups that are added to the optimizer which distributed_optimizer() was given, past what it returned."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fleet import fleet
from tests.helpers.checked_training import OPTIONS, STEPS, network, start, step_once, weights
from tests.helpers.workers import run_workers


def train(options: dict[str, Any], past: bool, before: bool = False) -> Tensor:
    """Adds the second layer ``past`` the wrapped optimizer, with ``before`` as it was before distributed_model()."""
    start(options)
    net = network()
    raw = torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9)
    late = list(net[2].parameters())
    optimizer = fleet.distributed_optimizer(raw)
    model = fleet.distributed_model(net)
    late = late if before else list(net[2].parameters())
    (raw if past else optimizer).add_param_group({"params": late, "lr": 0.05})
    for step in range(STEPS):
        step_once(model, optimizer, step)
    return weights(model)


def both(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    warnings.simplefilter("error")
    found = {name: [train(OPTIONS[name], past) for past in (False, True)] for name in OPTIONS}
    found["before"] = [train(OPTIONS["stage 2"], past, before=True) for past in (False, True)]
    return found


def test_a_group_that_is_added_to_the_inner_optimizer_trains_too() -> None:
    """Issue 36: stage 1 knew no owner of its parameters (KeyError); in the others it is as added to the wrapped one."""
    for found in run_workers(both, 2, backend=None):
        for name, (wrapped, inner) in found.items():
            torch.testing.assert_close(inner, wrapped, rtol=0, atol=0, msg=name)
            torch.testing.assert_close(inner, found["data_parallel"][0], rtol=0, atol=1e-5) if "stage" in name else None
