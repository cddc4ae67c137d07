"""What scripts do with a divided model beside the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fleet
from tests.helpers.workers import run_workers
from tests.strategies.test_sharding import Net, batch, net_of, options
from tests.strategies.test_sharding_states import error_of


class WithMethod(Net):
    """A net whose features can be asked for."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what goes into the last layer."""
        return self.norm(self.first(x))  # type: ignore[no-any-return]


def corners(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Walks through what scripts do beside the plain loop, in stages 2 and 3."""
    found: dict[str, Any] = {}
    for stage in (2, 3):
        strategy = options(2, stage=stage)
        fleet.init(is_collective=True, strategy=strategy)
        net = WithMethod()
        net.load_state_dict(net_of(0).state_dict())
        seen: list[torch.Size] = []
        net.last.weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.shape))
        model = fleet.distributed_model(net)
        model.eval()(batch(0, rank))  # no backward: the parameters are gathered now
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        late = fleet.distributed_optimizer(torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01))
        found[f"repointed {stage}"] = all(a is b for a, b in zip(parameters, late.parameters(), strict=True))
        loss = model(batch(0, rank)).square().mean()
        model.zero_grad()  # between forward and backward
        loss.backward()
        with torch.no_grad():
            before = model(batch(1, rank))  # gathers what the step changes
        late.step()
        model.zero_grad()
        with torch.no_grad():
            after = model(batch(1, rank))
        found[f"moved {stage}"] = not torch.equal(before, after)
        found[f"cleared {stage}"] = all(p.grad is None for p in model.parameters())
        found[f"hook {stage}"] = [tuple(shape) for shape in seen]
        model.mark_forward_method("features")
        model.features(batch(0, rank)).square().mean().backward()
        found[f"method {stage}"] = parameters[0].grad is not None
        with model.no_sync():
            model(batch(0, rank)).square().mean().backward()
        found[f"saved {stage}"] = error_of(fleet.save, {"m": dict(net.state_dict())}, f"{folder}/{rank}.pdparams")
    return found


def test_corners(tmp_path: Path) -> None:
    """Style-models part 4: weights move in any order of calls; hooks, methods and clearing act as in one process."""
    for found in run_workers(corners, 2, str(tmp_path), backend=None):
        for stage in (2, 3):
            for name in ("repointed", "moved", "cleared", "method"):
                assert found[f"{name} {stage}"] is True, f"{name} {stage}"
            assert found[f"hook {stage}"] == [(3, 7)]
            assert "full_state_dict() on every" in found[f"saved {stage}"]
