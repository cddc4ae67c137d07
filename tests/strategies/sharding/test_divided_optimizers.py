"""sharding with every optimizer of torch and fleet.optimizer: the same numbers, or a reason."""

from __future__ import annotations

from typing import Any

import torch

import fleet
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import net_of, options
from tests.strategies.sharding.test_sharding_company import trained
from tests.strategies.sharding.test_sharding_states import error_of

KINDS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "RMSProp": {"learning_rate": 0.01, "momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
FLEETS = {"ASGD": {"learning_rate": 0.1, "batch_num": 2}, "Adamax": {"learning_rate": 0.01, "weight_decay": 0.01}}
WHOLE_ONLY = ("Adafactor", "Rprop")


def every_optimizer(rank: int, world_size: int) -> dict[str, Any]:
    """Trains with every optimizer of torch that updates dense parameters one by one, in stages 1 and 3."""
    found: dict[str, Any] = {}
    for kind, settings in [*KINDS.items(), *FLEETS.items()]:
        name = f"fleet.optimizer.{kind}" if settings is FLEETS.get(kind) else kind
        found[name] = [trained(rank, None, kind, settings)]
        for stage in (1, 3):
            if stage == 3 and kind in WHOLE_ONLY:
                found[name].append(error_of(trained, rank, options(2, stage=3), kind, settings))
            else:
                found[name].append(trained(rank, options(2, stage=stage), kind, settings))
    fleet.init(is_collective=True, strategy=options(2))
    found["LBFGS"] = error_of(fleet.distributed_optimizer, torch.optim.LBFGS(net_of(0).parameters()))
    return found


def test_whatever_the_optimizer() -> None:
    """Issue: whatever the torch optimizer: the same numbers, or a refusal that says why and what to do."""
    for found in run_workers(every_optimizer, 2, backend=None):
        assert "LBFGS: its state is one history" in found.pop("LBFGS")
        for kind, (plain, *sharded) in found.items():
            for stage, state in zip((1, 3), sharded, strict=True):
                if isinstance(state, str):
                    assert (stage, kind in WHOLE_ONLY) == (3, True), state
                    assert f"torch.optim.{kind} needs it whole" in state
                    continue
                for name, value in plain.items():
                    torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0, msg=f"{kind} {stage} {name}")
