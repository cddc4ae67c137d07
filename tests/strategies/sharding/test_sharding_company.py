"""sharding together with lars, lamb, recompute, amp and to_static."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fleet
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import batch, net_of, options
from tests.strategies.sharding.test_sharding_states import steps


def trained(
    rank: int, strategy: Any, kind: str, settings: dict[str, Any], num_steps: int = 3
) -> dict[str, torch.Tensor]:
    """Trains with a strategy (``None``: data parallelism) and returns the whole state of the model."""
    fleet.init(is_collective=True, strategy=strategy)
    net = net_of(0)
    model = fleet.distributed_model(net)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if "learning_rate" in settings:  # Paddle's names of the arguments
        raw = getattr(fleet.optimizer, kind)(parameters=parameters, **settings)
    else:
        raw = getattr(torch.optim, kind)(parameters, **settings)
    optimizer = fleet.distributed_optimizer(raw)
    steps(model, optimizer, rank, 0, num_steps)
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


PURE = {"use_pure_fp16": True, "use_fp16_guard": False}
COMPANY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lamb": ("Adam", {"lr": 0.02}, {"lamb": True, "lamb_configs": {"exclude_from_weight_decay": ["bias"]}}),
    "lars": ("SGD", {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}, {"lars": True}),
    "recompute": ("Adam", {"lr": 0.01}, {"recompute": True, "recompute_configs": {"checkpoints": ["blocks.*"]}}),
    "sync_batch_norm": ("Adam", {"lr": 0.01}, {"sync_batch_norm": True}),
    "amp": ("Adam", {"lr": 0.01}, {"amp": True, "amp_configs": {"dtype": "bfloat16"}}),
    "amp float16": ("SGD", {"lr": 0.1, "momentum": 0.9}, {"amp": True, "amp_configs": {"dtype": "float16"}}),
    "amp pure float16": ("SGD", {"lr": 0.1, "momentum": 0.9}, {"amp": True, "amp_configs": PURE}),
    "amp pure bfloat16": ("SGD", {"lr": 0.1}, {"amp": True, "amp_configs": {"use_pure_bf16": True}}),
    "scale": ("SGD", {"lr": 0.01}, {"gradient_scale_configs": {"scale_strategy": "sum"}}),
}


def company(rank: int, world_size: int) -> dict[str, Any]:
    """Trains each option with data parallelism, and with each stage of sharding."""
    found: dict[str, Any] = {}
    for name, (kind, settings, switches) in COMPANY.items():
        for stage in (0, 1, 2, 3):
            strategy = options(2, stage=stage, segment_broadcast_MB=0.0003) if stage else fleet.DistributedStrategy()
            for option, value in switches.items():
                setattr(strategy, option, value)
            found[f"{name} {stage}"] = trained(rank, strategy, kind, settings, 4)
    return found


def test_company() -> None:
    """A.5: recompute, amp, lars and lamb go with sharding; norms are those of whole parameters."""
    for found in run_workers(company, 2, backend=None):
        for name in COMPANY:
            tolerance = 2e-3 if name.startswith("amp") else 2e-6  # 16-bit products, in another order
            for stage in (1, 2, 3):
                for key, value in found[f"{name} 0"].items():
                    mine, message = found[f"{name} {stage}"][key], f"{name} {stage} {key}"
                    torch.testing.assert_close(mine, value, atol=tolerance, rtol=0, msg=message)
        assert not torch.equal(found["scale 0"]["last.weight"], found["recompute 0"]["last.weight"])


def overflow(rank: int, world_size: int) -> list[Any]:
    """Lets the gradients of worker 1 overflow at step 1; with amp's own scale, and with the user's scaler."""
    found = []
    for stage in (1, 2, 3):
        for explicit in (False, True):
            strategy = options(2, stage=stage)
            if not explicit:
                strategy.amp = True
                strategy.amp_configs = {"dtype": "float16", "init_loss_scaling": 8.0, "decr_every_n_nan_or_inf": 1}
            fleet.init(is_collective=True, strategy=strategy)
            net, armed = net_of(0), [False]

            def spoil(gradient: torch.Tensor, armed: list[bool] = armed) -> torch.Tensor:
                # The last row belongs to worker 1 alone after the exchange.
                return gradient + torch.tensor([0.0, 0.0, torch.inf]) if armed[0] else gradient

            net.last.bias.register_hook(spoil)
            model = fleet.distributed_model(net)
            optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=8.0)) if explicit else None
            states = [model.full_state_dict()]
            for step in range(3):
                loss = model(batch(step, rank)).square().mean()
                armed[0] = (rank, step) == (1, 1)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
                states.append(model.full_state_dict())
            moved = [
                any(not torch.equal(a[name], b[name]) for name in a if name.endswith(("weight", "bias")))
                for a, b in itertools.pairwise(states)
            ]
            finite = all(bool(value.isfinite().all()) for value in states[-1].values())
            scale = scaler.get_scale() if scaler is not None else optimizer.get_loss_scaling()
            found.append((stage, explicit, moved, finite, scale < 8.0))
    return found


def test_an_overflow_on_one_worker_skips_the_step_on_all() -> None:
    """A.2 amp: gradients differ between the workers of stages 2 and 3, and all of them skip together."""
    for found in run_workers(overflow, 2, backend=None):
        for stage, explicit, moved, finite, smaller in found:
            assert (moved, finite, smaller) == ([True, False, True], True, True), (stage, explicit)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compiled(stage: int) -> None:
    """to_static and sharding: the compiled model trains as the plain one."""
    for plain, compiled in run_workers(compile_both, 2, stage, backend=None, timeout_s=240):
        for name, value in plain.items():
            torch.testing.assert_close(compiled[name], value, atol=1e-5, rtol=0, msg=name)


def compile_both(rank: int, world_size: int, stage: int) -> Any:
    """Trains once with data parallelism and once compiled with sharding."""
    strategy = options(2, stage=stage)
    strategy.to_static = True
    return trained(rank, None, "Adam", {"lr": 0.01}), trained(rank, strategy, "Adam", {"lr": 0.01})
