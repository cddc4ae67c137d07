"""Outputs that are views and are changed in place, in stages 2 and 3: trained as in one process, without a warning."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fleet
from fleet.strategies._gradients import viewed
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import options

COVERED = (viewed,)


class Pairs(nn.Module):
    """Returns a view of its last layer's output, [rows, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).view(-1, 2, 2)


class Residual(nn.Module):
    """Adds to the view that an inner unit returns, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.skip = Pairs(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pairs(x)
        out += self.skip(x).view(-1, 2, 2)
        return out


def loss_of(model: Any, x: Tensor, changes: bool) -> Tensor:
    """Returns a loss of the outputs, which the loop changes in place or not."""
    out = model(x)
    if changes:
        out += 0.1
        out.mul_(2)
    return F.mse_loss(out, x[:, :4].view(-1, 2, 2))


def trained(rank: int, make: Any, changes: bool, batches: int, configs: dict[str, Any]) -> float:
    """Returns how far the worst parameter is from that of one process after four batches."""
    strategy = options(2, gradient_merge_acc_step=batches, **configs)
    strategy.find_unused_parameters = batches == 1 and configs["stage"] == 2
    fleet.init(is_collective=True, strategy=strategy)
    torch.manual_seed(0)
    plain, net = make(), make()
    net.load_state_dict(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for batch in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(batch))
        loss_of(model, x[rank::2], changes).backward()
        optimizer.step()
        optimizer.zero_grad()
        (loss_of(plain, x, changes) / batches).backward()
        if batch % batches == batches - 1:
            reference.step()
            reference.zero_grad()
    state = model.full_state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


def all_views(rank: int, world_size: int) -> dict[str, float]:
    """Trains with and without changes in place; a warning is an error."""
    anchored = {"sharding_segment_strategy": "segment_anchors", "segment_anchors": ["pairs"]}
    cases: dict[str, tuple[Any, bool, int, dict[str, Any]]] = {
        "kept": (Pairs, False, 1, {"stage": 3}),
        "stage 2": (Pairs, True, 1, {"stage": 2}),
        "stage 3": (Pairs, True, 1, {"stage": 3}),
        "inner": (Residual, True, 1, {"stage": 3, **anchored}),
        "two batches": (Pairs, True, 2, {"stage": 3}),
        "two batches in stage 2": (Pairs, True, 2, {"stage": 2}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: trained(rank, *case) for name, case in cases.items()}


def test_a_view_changed_in_place_is_trained() -> None:
    """Stage 2 stayed local without an error, stage 3 failed with torch's, and each such model got torch's warning."""
    for found in run_workers(all_views, 2, backend=None):
        assert {name: value for name, value in found.items() if not value < 1e-6} == {}
