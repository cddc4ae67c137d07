"""Loops that clip in every form users write, for a mesh and for one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import fleet
from fleet.job.axes import Axes
from fleet.job.running import running_session
from tests.helpers.toy_mesh import Toy, batch, own_rows, whole_parameters

LIMIT, STEPS = 0.05, 3
Seen = list[float]


class ClippingSGD(torch.optim.SGD):
    """Clips inside its own step()."""

    seen: Seen

    def step(self, closure: Any = None) -> Any:
        self.seen.append(float(_item(clip_grad_norm_([p for g in self.param_groups for p in g["params"]], LIMIT))))
        return super().step(closure)


def _item(norm: Tensor) -> Tensor:
    full = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


def after_backward(model: nn.Module, optimizer: Any, seen: Seen, loss: Tensor) -> None:
    loss.backward()
    seen.append(float(_item(clip_grad_norm_(model.parameters(), LIMIT))))
    optimizer.step()


def imported_before(model: nn.Module, optimizer: Any, seen: Seen, loss: Tensor) -> None:
    loss.backward()
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    seen.append(float(_item(norm)))
    clip_grads_with_norm_(model.parameters(), LIMIT, norm)
    optimizer.step()


def only_step(model: nn.Module, optimizer: Any, seen: Seen, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def hooked(parameters: Any, seen: Seen) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, 0.5, momentum=0.9)

    def clip(stepping: Any, args: Any, kwargs: Any) -> None:
        seen.append(float(_item(clip_grad_norm_([p for g in stepping.param_groups for p in g["params"]], LIMIT))))

    optimizer.register_step_pre_hook(clip)
    return optimizer


def subclass(parameters: Any, seen: Seen) -> torch.optim.Optimizer:
    optimizer = ClippingSGD(parameters, 0.5, momentum=0.9)
    optimizer.seen = seen
    return optimizer


def plain(parameters: Any, seen: Seen) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


def fleets(parameters: Any, seen: Seen) -> torch.optim.Optimizer:
    return fleet.optimizer.Momentum(0.5, 0.9, parameters, grad_clip=fleet.ClipGradByGlobalNorm(LIMIT))


def fleets_each(parameters: Any, seen: Seen) -> torch.optim.Optimizer:
    return fleet.optimizer.Momentum(0.5, 0.9, parameters, grad_clip=fleet.ClipGradByNorm(LIMIT))


# name -> (how the optimizer is made, what happens with the loss); "scaled" adds a plain GradScaler
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "after backward": (plain, after_backward),
    "imported before": (plain, imported_before),
    "step_pre_hook": (hooked, only_step),
    "subclass": (subclass, only_step),
    "scaler": (plain, after_backward),
    "ClipGradByGlobalNorm": (fleets, only_step),
    "ClipGradByNorm": (fleets_each, only_step),
}


def train(form: str, axes: Axes | None, wrap: bool) -> dict[str, Any]:
    """Trains a few steps in one form; returns losses of this worker's rows, norms and whole parameters."""
    make, act = FORMS[form]
    seen: Seen = []
    model: Any = Toy(axes)
    optimizer: Any = make(model.parameters(), seen)
    if wrap:
        model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=form == "scaler")
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        if axes is not None:
            x, y = own_rows(x, axes), own_rows(y, axes)
        loss = cross_entropy(model(x), y)
        losses.append(float(loss.detach()))
        if form == "scaler":
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen.append(float(_item(clip_grad_norm_(model.parameters(), LIMIT))))
            scaler.step(optimizer)
            scaler.update()
        else:
            act(model, optimizer, seen, loss)
        optimizer.zero_grad()
    inner = model.module if wrap else model
    weights = whole_parameters(inner, axes) if axes is not None else dict(inner.state_dict())
    return {"losses": losses, "norms": seen, "weights": weights}


def init(**options: Any) -> Axes:
    """Starts one more session with ``options``; returns its mesh."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    session = running_session()
    assert session is not None
    return session.job.axes


def on_meshes(rank: int, world_size: int, meshes: list[tuple[dict[str, Any], list[str]]]) -> list[dict[str, Any]]:
    """Trains on each of ``meshes`` in its forms; returns what :func:`train` found, by form."""
    return [{form: train(form, init(**options), wrap=True) for form in forms} for options, forms in meshes]


def overflow(rank: int, world_size: int) -> dict[str, Any]:
    """Trains three steps; in the second the gradient of a part on one mp rank is infinite. Returns what was skipped."""
    return {kind: overflow_once(kind) for kind in ("amp", "plain scaler", "shared scaler", "amp and scaler")}


def overflow_once(kind: str) -> dict[str, Any]:
    """Returns the steps that changed a parameter, and the scale after each."""
    amp = {"amp": True, "amp_configs": {"dtype": "float16", "decr_every_n_nan_or_inf": 1}} if "amp" in kind else {}
    axes = init(hybrid_configs={"mp_degree": 2}, **amp)
    net = Toy(axes)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model: Any = fleet.distributed_model(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in kind)
    if "shared" in kind or kind == "amp and scaler":
        scaler = fleet.distributed_scaler(scaler)
    step = 0
    if axes.rank("mp") == 1:
        net.up.weight.register_hook(lambda gradient: gradient * (torch.inf if step == 1 else 1.0))
    moved, scales = [], []
    for step in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        x, y = batch(step)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(old, p) for old, p in zip(before, net.parameters(), strict=True)))
        scales.append(scaler.get_scale() if "scaler" in kind else fleet.get_loss_scaling())
    return {"moved": moved, "scales": scales}
