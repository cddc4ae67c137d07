"""sharding: every stage trains as plain data parallelism does, with less memory on each worker."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.strategies._parts import local
from tests.fleet.test_recorded_results import recorded_net, weights
from tests.helpers.workers import run_workers

DATA = Path(__file__).parent.parent / "data" / "collective"
TOLERANCE = 1e-6
STEPS = 6
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.05}),
}


def options(degree: int = 2, **configs: Any) -> fleet.DistributedStrategy:
    """Returns a strategy with sharding on."""
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": degree, **configs}
    return strategy


class Net(nn.Module):
    """Blocks with batch norm, a frozen layer, and sizes that two and four workers do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)  # under batch norm a bias has gradient 0 and noise
        self.norm = nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns scores [batch, 3]."""
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.frozen(x))  # type: ignore[no-any-return]


def net_of(seed: int) -> Net:
    """Returns the net with the weights of ``seed``."""
    torch.manual_seed(seed)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    """Returns the data of one worker at one step."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    optimizer_name: str, rank: int, *, model_first: bool = True, clip: float | None = None, decay: float = 1.0
) -> dict[str, Any]:
    """Trains in the session that runs; returns the whole state, the norms before clipping, and the losses."""
    kind, settings = OPTIMIZERS[optimizer_name]
    net = net_of(rank)  # rank 0's weights must win
    raw = getattr(torch.optim, kind)([p for p in net.parameters() if p.requires_grad], **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(raw, decay)
    if model_first:
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(raw)
    else:
        optimizer = fleet.distributed_optimizer(raw)
        model = fleet.distributed_model(net)
    norms, losses = [], []
    for step in range(STEPS):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return {"state": model.full_state_dict(), "norms": norms, "losses": losses, "bytes": bytes_held(model, optimizer)}


def bytes_held(model: Any, optimizer: Any) -> dict[str, int]:
    """Returns what this worker holds of the trainable parameters, and of the optimizer's state."""
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "parameters": sum(local(p).untyped_storage().nbytes() for p in model.parameters() if p.requires_grad),
        "state": sum(local(v).untyped_storage().nbytes() for v in state),
    }


def train_all(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Trains every case (optimizer, sharding_configs, arguments of train), each beside plain data parallelism."""
    found = []
    plain: dict[str, Any] = {}
    for name, configs, arguments in cases:
        key = repr((name, {k: v for k, v in arguments.items() if k != "model_first"}))
        if key not in plain:
            fleet.init(is_collective=True)
            plain[key] = train(name, rank, **arguments)
        fleet.init(is_collective=True, strategy=options(world_size, **configs))
        sharded = train(name, rank, **arguments)
        found.append((plain[key], sharded))
    return found


def check_same(plain: dict[str, Any], sharded: dict[str, Any], label: str) -> None:
    """Checks that two runs had the same losses, norms and state."""
    assert sharded["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE), label
    assert sharded["norms"] == pytest.approx(plain["norms"], rel=1e-5), label
    assert list(sharded["state"]) == list(plain["state"]), label
    for name, value in plain["state"].items():
        torch.testing.assert_close(sharded["state"][name], value, atol=TOLERANCE, rtol=0, msg=f"{label}: {name}")


STAGES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "segment_broadcast_MB": 0.0003},
    {
        "stage": 3,
        "sharding_segment_strategy": "segment_anchors",
        "segment_anchors": ["first", "blocks.0", "blocks.1", "last"],
    },
]


def test_every_stage_equals_data_parallel() -> None:
    """A.2 sharding_configs, A.10: three optimizers, every stage, units by size and by name, within 1e-6."""
    cases = [(name, configs, {}) for name in OPTIMIZERS for configs in STAGES]
    for results in run_workers(train_all, 2, cases, backend=None):
        for (name, configs, _), (plain, sharded) in zip(cases, results, strict=True):
            check_same(plain, sharded, f"{name} {configs}")


def test_order_of_calls_schedulers_and_clipping() -> None:
    """Issue: either call first, a scheduler on the raw optimizer, clipping by the global norm (A.9)."""
    arguments = [
        {"model_first": first, "clip": clip, "decay": 0.7} for first, clip in itertools.product((True, False), (0.05, 9.0))
    ]
    cases = [("adamw", {"stage": stage}, case) for stage in (1, 2, 3) for case in arguments]
    for results in run_workers(train_all, 2, cases, backend=None):
        for (_, configs, case), (plain, sharded) in zip(cases, results, strict=True):
            check_same(plain, sharded, f"{configs} {case}")
            assert len(sharded["norms"]) == STEPS
        assert results[0][0]["norms"][0] > 0.05  # so that clipping does something
