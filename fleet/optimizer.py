"""Optimizers with the constructors of Fleet scripts, for scripts that move over line by line.

Each is torch's optimizer of the same rule: only the names of the arguments differ, and ``grad_clip`` and
``weight_decay=L1Decay(...)`` act at each update, in Fleet's order: clip, then decay, then the rule.

Example:
    >>> momentum = fleet.optimizer.Momentum(0.1, 0.9, net.parameters(), weight_decay=fleet.regularizer.L2Decay(1e-4))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.clip import GradientClip
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.regularizer import L1Decay, L2Decay
from fleet.strategies._optimizer import OptimizerWrapper
from fleet.strategies.lamb import LambAdam

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lamb", "Momentum"]

Decay = float | L1Decay | L2Decay | None
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | None


def SGD(
    learning_rate: float = 0.001,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    multi_precision: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.SGD`` without momentum: ``p -= lr * g``."""
    return Momentum(learning_rate, 0.0, parameters, False, weight_decay, grad_clip, multi_precision, name)


def Momentum(
    learning_rate: float = 0.001,
    momentum: float = 0.9,
    parameters: Parameters = None,
    use_nesterov: bool = False,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    multi_precision: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.SGD`` with momentum: ``v = m v + g; p -= lr v`` (Nesterov: ``p -= lr (g + m v)``)."""
    params = checked(learning_rate, parameters, weight_decay, multi_precision=multi_precision)
    made = torch.optim.SGD(params, learning_rate, momentum, weight_decay=l2_of(weight_decay), nesterov=use_nesterov)
    return with_steps_before(made, grad_clip, weight_decay)


def Adam(
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    lazy_mode: bool = False,
    multi_precision: bool = False,
    use_multi_tensor: bool = False,
    amsgrad: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.Adam``."""
    params = checked(learning_rate, parameters, weight_decay, lazy_mode=lazy_mode, multi_precision=multi_precision)
    made = torch.optim.Adam(
        params,
        learning_rate,
        (beta1, beta2),
        epsilon,
        l2_of(weight_decay),
        amsgrad,
        foreach=use_multi_tensor or None,
    )
    return with_steps_before(made, grad_clip, weight_decay)


def AdamW(
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    parameters: Parameters = None,
    weight_decay: float = 0.01,
    lr_ratio: object = None,
    apply_decay_param_fun: object = None,
    grad_clip: GradientClip | None = None,
    lazy_mode: bool = False,
    multi_precision: bool = False,
    amsgrad: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.AdamW``: ``p *= 1 - lr * weight_decay``, then Adam's step."""
    for label, value in (("lr_ratio", lr_ratio), ("apply_decay_param_fun", apply_decay_param_fun)):
        if value is not None:
            raise UnsupportedOptionError(
                f"AdamW({label}=...) goes by Paddle's parameter names, which torch does not have. Give groups "
                'with rates or decays of their own: parameters=[{"params": [...], "weight_decay": 0.0}, ...].'
            )
    params = checked(learning_rate, parameters, None, lazy_mode=lazy_mode, multi_precision=multi_precision)
    made = torch.optim.AdamW(params, learning_rate, (beta1, beta2), epsilon, weight_decay, amsgrad)
    return with_steps_before(made, grad_clip, None)


def Adagrad(
    learning_rate: float,
    epsilon: float = 1e-6,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    name: str | None = None,
    initial_accumulator_value: float = 0.0,
) -> Optimizer:
    """Returns ``torch.optim.Adagrad``: ``G += g^2; p -= lr g / (sqrt(G) + eps)``."""
    params = checked(learning_rate, parameters, weight_decay)
    made = torch.optim.Adagrad(
        params,
        learning_rate,
        weight_decay=l2_of(weight_decay),
        initial_accumulator_value=initial_accumulator_value,
        eps=epsilon,
    )
    return with_steps_before(made, grad_clip, weight_decay)


def Lamb(
    learning_rate: float = 0.001,
    lamb_weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    parameters: Parameters = None,
    grad_clip: GradientClip | None = None,
    exclude_from_weight_decay_fn: object = None,
    multi_precision: bool = False,
    name: str | None = None,
) -> OptimizerWrapper:
    """Returns LAMB as ``strategy.lamb`` applies it, for a script that names the optimizer itself."""
    if exclude_from_weight_decay_fn is not None:
        raise UnsupportedOptionError(
            "Lamb(exclude_from_weight_decay_fn=...) takes Paddle's parameters. Use torch.optim.Adam with "
            "strategy.lamb = True and lamb_configs['exclude_from_weight_decay'], which goes by torch's names."
        )
    adam = Adam(learning_rate, beta1, beta2, epsilon, parameters, None, grad_clip, multi_precision=multi_precision)
    unused: Any = None
    return LambAdam(adam, "lamb", unused, None, decay=lamb_weight_decay)


def checked(learning_rate: object, parameters: Parameters, weight_decay: object, **off: bool) -> Any:
    """Returns ``parameters``; raises ConfigError for arguments that torch does not take, or takes otherwise."""
    if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
        raise ConfigError(
            f"learning_rate is {learning_rate!r}; it takes a number. A schedule is made around the optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, ...)."
        )
    if parameters is None:
        raise ConfigError("parameters is None; pass model.parameters().")
    allowed = isinstance(weight_decay, L1Decay | L2Decay | int | float) and not isinstance(weight_decay, bool)
    if weight_decay is not None and not allowed:
        raise ConfigError(f"weight_decay is {weight_decay!r}; it takes a number, L1Decay or L2Decay.")
    for name, value in off.items():
        if value:
            raise UnsupportedOptionError(f"{name}=True is not offered; master weights come with strategy.amp.")
    return parameters


def l2_of(weight_decay: Decay) -> float:
    """Returns the L2 coefficient that torch's ``weight_decay`` takes."""
    if isinstance(weight_decay, L2Decay):
        return float(weight_decay.coeff)
    return 0.0 if weight_decay is None or isinstance(weight_decay, L1Decay) else float(weight_decay)


def with_steps_before(optimizer: Optimizer, grad_clip: GradientClip | None, weight_decay: Decay) -> Optimizer:
    """Returns ``optimizer``, which clips and adds L1 decay before each of its updates."""
    if grad_clip is not None and not isinstance(grad_clip, GradientClip):
        raise ConfigError(f"grad_clip is {grad_clip!r}; it takes fleet.ClipGradByGlobalNorm(...) or one of its kind.")
    l1 = float(weight_decay.coeff) if isinstance(weight_decay, L1Decay) else 0.0
    if grad_clip is None and not l1:
        return optimizer

    def before_step(stepping: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in stepping.param_groups for p in group["params"] if p.grad is not None]
        if grad_clip is not None:
            grad_clip.clip([p.grad for p in parameters])
        if l1:
            with torch.no_grad():
                for p in parameters:
                    p.grad.add_(p.sign(), alpha=l1)

    optimizer.register_step_pre_hook(before_step)
    return optimizer
