"""Arguments of the constructors of ``fleet.optimizer``: groups in Paddle's form, decays, and work before each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.clip import GradientClip
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.regularizer import L1Decay, L2Decay

Decay = float | L1Decay | L2Decay | None
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | None


def checked(
    learning_rate: object, parameters: Parameters, weight_decay: Decay, grad_clip: object, **off: bool
) -> list[dict[str, Any]]:
    """Returns groups in torch's form: a rate and an L2 decay each, and under ``l1_decay`` an L1 decay.

    Raises ConfigError for arguments that torch does not take, or takes with a different meaning.
    """
    rate = number("learning_rate", learning_rate)
    if parameters is None:
        raise ConfigError("parameters is None; pass model.parameters().")
    if grad_clip is not None and not isinstance(grad_clip, GradientClip):
        raise ConfigError(f"grad_clip is {grad_clip!r}; it takes fleet.ClipGradByGlobalNorm(...) or its siblings.")
    for name, value in off.items():
        if value:
            raise UnsupportedOptionError(f"{name}=True is not supported; strategy.amp brings master weights.")
    given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not given:
        raise ConfigError("parameters is empty; pass model.parameters() of a model that has parameters.")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    return [_group(group, rate, weight_decay) for group in groups]


def _group(group: dict[str, Any], rate: float, weight_decay: Decay) -> dict[str, Any]:
    """Converts one group from Paddle's form to torch's."""
    if unknown := set(group) - {"params", "learning_rate", "weight_decay"}:
        raise ConfigError(
            f"A parameter group has {sorted(unknown)}; it takes 'params', 'learning_rate' (a factor on the "
            "optimizer's) and 'weight_decay'. Use an optimizer from torch.optim for other settings by group."
        )
    if "params" not in group:
        raise ConfigError(f"A parameter group has {sorted(group)} and no 'params'.")
    decay = group.get("weight_decay", weight_decay)
    if decay is not None and not isinstance(decay, L1Decay | L2Decay):
        decay = L2Decay(number("weight_decay", decay, "a number, L1Decay or L2Decay"))
    made = {"params": group["params"], "weight_decay": float(decay.coeff) if isinstance(decay, L2Decay) else 0.0}
    if isinstance(decay, L1Decay):
        made["l1_decay"] = float(decay.coeff)
    if "learning_rate" in group:
        made["lr_factor"] = number("learning_rate of a group", group["learning_rate"])
        made["lr"] = rate * made["lr_factor"]
    return made


def number(name: str, value: object, takes: str = "a number") -> float:
    """Returns ``value`` as a float; raises ConfigError unless it is a number."""
    # True would pass as 1.0, because bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float):
        schedule = (
            " A schedule wraps the optimizer: torch.optim.lr_scheduler.StepLR(optimizer, ...)."
            if name == "learning_rate"
            else ""
        )
        raise ConfigError(f"{name} is {value!r}; it takes {takes}.{schedule}")
    return float(value)


def with_steps_before(optimizer: Optimizer, grad_clip: GradientClip | None) -> Optimizer:
    """Returns ``optimizer``, which now clips and adds L1 decay before each update."""
    if grad_clip is None and not any(group.get("l1_decay") for group in optimizer.param_groups):
        return optimizer

    # A hook leaves the class alone: the script holds torch's own optimizer, as the constructors promise.
    @torch.no_grad()
    def before_step(stepping: Optimizer, args: Any, kwargs: Any) -> None:
        # Fleet's order: the norm counts the gradients alone, and the decay that follows is not clipped.
        if grad_clip is not None:
            grad_clip.clip([p.grad for group in stepping.param_groups for p in group["params"] if p.grad is not None])
        for group in stepping.param_groups:
            for p in group["params"] if group.get("l1_decay") else ():
                if p.grad is not None:
                    p.grad.add_(p.sign(), alpha=group["l1_decay"])

    optimizer.register_step_pre_hook(before_step)
    return optimizer


def muon_groups(parameters: Any) -> list[dict[str, Any]]:
    """Returns groups with ``use_muon`` set; matrices take Muon where a group does not say."""
    given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not given:
        raise ConfigError("parameters is empty; pass model.parameters() of a model that has parameters.")
    made: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = given if isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        # A list: the parameters may come as a generator, and they are read more than once below.
        held: list[Tensor] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if "use_muon" not in group:
            for use, chosen in ((True, [p for p in held if p.dim() == 2]), (False, [p for p in held if p.dim() != 2])):
                made += [{**group, "params": chosen, "use_muon": use}] if chosen else []
            continue
        if group["use_muon"] and any(p.dim() < 2 for p in held):
            raise ConfigError("Muon: a group with use_muon holds a parameter of fewer than two dims. Give it to AdamW.")
        made.append({**group, "params": held})
    return made
