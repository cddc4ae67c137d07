"""Parameters with fewer rows than workers, and without any element, in stages 2 and 3."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from fleet import fleet
from tests.helpers.checked_training import OPTIONS, batch, flat, start, weights
from tests.helpers.workers import run_workers


class Scaled(nn.Module):
    """A layer, a scale of one row, and a parameter without elements that takes part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x) * self.scale, self.nothing])


def losses(
    model: nn.Module, clipped: nn.Module, optimizer: torch.optim.Optimizer, ranks: tuple[int, ...], order: float
) -> list[float]:
    """Trains on the batches of ``ranks``; returns the norms of the gradients."""
    norms = []
    for step in range(3):
        model(torch.cat([batch(step, rank) for rank in ranks])).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.05, norm_type=order)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def norms(rank: int, world_size: int) -> dict[str, tuple[list[float], Tensor]]:
    warnings.simplefilter("error")
    found = {}
    for name in ("stage 2", "stage 3"):
        for order in (math.inf, 2.0, 1.0):
            start(OPTIONS[name])
            net = Scaled()
            optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), 0.1))
            model = fleet.distributed_model(net)
            found[f"{name}, {order}"] = losses(model, model, optimizer, (rank,), order), weights(model)
    return found


def test_norms_of_every_order() -> None:
    """Issue 36: torch takes no largest element of an empty part, and reduces no gradient without elements."""
    plain = {}
    for order in (math.inf, 2.0, 1.0):
        net = Scaled()
        with_elements = nn.ModuleList(
            [net.layer, nn.ParameterList([net.scale])]
        )  # one process has none of an order inf
        plain[order] = losses(net, with_elements, torch.optim.AdamW(net.parameters(), 0.1), (0, 1), order), net
    for found in run_workers(norms, 2, backend=None):
        for name, (seen, trained) in found.items():
            expected, net = plain[float(name.split()[-1])]
            torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6, msg=name)
            torch.testing.assert_close(trained, flat(net.state_dict()), rtol=1e-4, atol=1e-5, msg=name)
