"""sharding together with lars, lamb, recompute, amp and to_static, with every torch optimizer, and by one call."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from tests.helpers.workers import run_workers
from tests.strategies.test_sharding import Net, batch, net_of, options
from tests.strategies.test_sharding_states import error_of, steps

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
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
WHOLE_ONLY = ("Adafactor", "Rprop")


def trained(
    rank: int, strategy: Any, kind: str, settings: dict[str, Any], num_steps: int = 3
) -> dict[str, torch.Tensor]:
    """Trains with a strategy (``None``: data parallelism) and returns the whole state of the model."""
    fleet.init(is_collective=True, strategy=strategy)
    net = net_of(0)
    model = fleet.distributed_model(net)
    raw = getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], **settings)
    optimizer = fleet.distributed_optimizer(raw)
    steps(model, optimizer, rank, 0, num_steps)
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return state


def every_optimizer(rank: int, world_size: int) -> dict[str, Any]:
    """Trains with every optimizer of torch that updates dense parameters one by one, in stages 1 and 3."""
    found: dict[str, Any] = {}
    for kind, settings in KINDS.items():
        found[kind] = [trained(rank, None, kind, settings)]
        for stage in (1, 3):
            if stage == 3 and kind in WHOLE_ONLY:
                found[kind].append(error_of(trained, rank, options(2, stage=3), kind, settings))
            else:
                found[kind].append(trained(rank, options(2, stage=stage), kind, settings))
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


def one_call(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Trains by group_sharded_parallel at each level, and saves."""
    found: dict[str, Any] = {"plain": trained(rank, None, "Adam", {"lr": 0.01})}
    for level in ("os", "os_g", "p_g_os"):
        fleet.init(is_collective=True)
        net = net_of(rank)
        raw = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01)
        model, optimizer, scaler = fleet.group_sharded_parallel(net, raw, level)
        steps(model, optimizer, rank, 0, 3)
        fleet.save_group_sharded_model(model, f"{folder}/{level}", optimizer)
        files = [fleet.load(f"{folder}/{level}/model.{suffix}") for suffix in ("pdmodel", "pdopt")]
        found[level] = (*files, scaler)
        entries = optimizer.local_state_dict()["state"].values()
        found[f"{level} state"] = sum(value.numel() for entry in entries for value in entry.values())
    file = Path(folder, f"file{rank}")
    file.write_text("")
    net, raw = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    found["errors"] = [
        error_of(fleet.save_group_sharded_model, model, str(file)),
        error_of(fleet.group_sharded_parallel, net, raw, "o"),
        error_of(fleet.group_sharded_parallel, net, raw, "os", exclude_layer=["GroupNorm"]),
        error_of(fleet.group_sharded_parallel, net, raw, "os", buffer_max_size=0),
        error_of(fleet.group_sharded_parallel, model, raw, "os"),
        error_of(fleet.save_group_sharded_model, net, folder),
    ]
    return found


def test_group_sharded_parallel(tmp_path: Path) -> None:
    """B.10, G19: the three levels train alike, 'os' keeps gradients whole; files load into plain objects."""
    results = run_workers(one_call, 2, str(tmp_path), backend=None)
    plain = results[0]["plain"]  # with rank 0's statistics
    for found in results:
        for level in ("os", "os_g", "p_g_os"):
            state, optimizer_state, scaler = found[level]
            net = Net()
            net.load_state_dict(state)
            torch.optim.Adam([p for p in net.parameters() if p.requires_grad]).load_state_dict(optimizer_state)
            assert scaler is None
            for name, value in plain.items():
                torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0, msg=f"{level}: {name}")
            whole = sum(v.numel() for entry in optimizer_state["state"].values() for v in entry.values())
            assert found[f"{level} state"] < 0.62 * whole
        parts = ("Name a folder", "'os_g', 'p_g_os'", "exclude_layer", "at least 1", "takes your", "that group_sharded")
        for error, part in zip(found["errors"], parts, strict=True):
            assert part in error


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
