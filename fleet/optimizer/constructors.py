"""Constructors of Paddle's optimizers whose rules torch has, or this library for an option."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.clip import GradientClip
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.optimizer.optimizer_arguments import Decay, Parameters, checked, muon_groups, number, with_steps_before
from fleet.regularizer import L1Decay, L2Decay
from fleet.strategies._shared.muon import MuonRule
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies.lamb import LambAdam


def SGD(
    learning_rate: float = 0.001,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    multi_precision: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.SGD`` without momentum: ``p -= lr * g``."""
    groups = checked(learning_rate, parameters, weight_decay, grad_clip, multi_precision=multi_precision)
    return with_steps_before(torch.optim.SGD(groups, learning_rate), grad_clip)


def Momentum(
    learning_rate: float = 0.001,
    momentum: float = 0.9,
    parameters: Parameters = None,
    use_nesterov: bool = False,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    multi_precision: bool = False,
    rescale_grad: float = 1.0,
    use_multi_tensor: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.SGD`` with momentum: ``v = m v + g; p -= lr v`` (Nesterov: ``p -= lr (g + m v)``)."""
    if rescale_grad != 1.0:
        raise UnsupportedOptionError(
            f"Momentum(rescale_grad={rescale_grad!r}) is not supported. Multiply the loss by it before backward()."
        )
    groups = checked(learning_rate, parameters, weight_decay, grad_clip, multi_precision=multi_precision)
    made = torch.optim.SGD(groups, learning_rate, momentum, nesterov=use_nesterov, foreach=use_multi_tensor or None)
    return with_steps_before(made, grad_clip)


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
    off = {"lazy_mode": lazy_mode, "multi_precision": multi_precision}
    groups = checked(learning_rate, parameters, weight_decay, grad_clip, **off)
    made = torch.optim.Adam(
        groups, learning_rate, (beta1, beta2), epsilon, amsgrad=amsgrad, foreach=use_multi_tensor or None
    )
    return with_steps_before(made, grad_clip)


def AdamW(
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    parameters: Parameters = None,
    weight_decay: float = 0.01,
    use_lowprecision_moment: bool = False,
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
                f"AdamW({label}=...) uses Paddle's parameter names, which torch does not have. Pass groups "
                'with separate rates or decays: parameters=[{"params": [...], "weight_decay": 0.0}, ...].'
            )
    if isinstance(weight_decay, L1Decay | L2Decay):
        raise ConfigError(
            f"AdamW(weight_decay={weight_decay!r}): it takes a number, which decays the parameter itself."
        )
    off = {"lazy_mode": lazy_mode, "multi_precision": multi_precision}
    off["use_lowprecision_moment"] = use_lowprecision_moment
    groups = checked(learning_rate, parameters, weight_decay, grad_clip, **off)
    if any("l1_decay" in group for group in groups):
        raise ConfigError("AdamW decays the parameter itself; weight_decay of a group takes a number, not L1Decay.")
    made = torch.optim.AdamW(groups, learning_rate, (beta1, beta2), epsilon, amsgrad=amsgrad)
    return with_steps_before(made, grad_clip)


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
    groups = checked(learning_rate, parameters, weight_decay, grad_clip)
    made = torch.optim.Adagrad(groups, learning_rate, initial_accumulator_value=initial_accumulator_value, eps=epsilon)
    return with_steps_before(made, grad_clip)


def Adadelta(
    learning_rate: float = 0.001,
    epsilon: float = 1e-6,
    rho: float = 0.95,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.Adadelta``."""
    groups = checked(learning_rate, parameters, weight_decay, grad_clip)
    return with_steps_before(torch.optim.Adadelta(groups, learning_rate, rho, epsilon), grad_clip)


def NAdam(
    learning_rate: float = 0.002,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    momentum_decay: float = 0.004,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.NAdam``."""
    groups = checked(learning_rate, parameters, weight_decay, grad_clip)
    made = torch.optim.NAdam(groups, learning_rate, (beta1, beta2), epsilon, momentum_decay=momentum_decay)
    return with_steps_before(made, grad_clip)


def RAdam(
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.RAdam``."""
    groups = checked(learning_rate, parameters, weight_decay, grad_clip)
    return with_steps_before(torch.optim.RAdam(groups, learning_rate, (beta1, beta2), epsilon), grad_clip)


def Rprop(
    learning_rate: float = 0.001,
    learning_rate_range: tuple[float, float] = (1e-5, 50),
    parameters: Parameters = None,
    etas: tuple[float, float] = (0.5, 1.2),
    grad_clip: GradientClip | None = None,
    multi_precision: bool = False,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.Rprop``; ``learning_rate_range`` bounds the step sizes."""
    groups = checked(learning_rate, parameters, None, grad_clip, multi_precision=multi_precision)
    # checked() sets weight_decay in every group. Rprop has no such setting, so the key must not stay in its groups.
    if any(group.pop("weight_decay") or "l1_decay" in group for group in groups):
        raise ConfigError("Rprop takes no weight_decay, not in groups either: it uses only the signs of the gradients.")
    return with_steps_before(torch.optim.Rprop(groups, learning_rate, etas, learning_rate_range), grad_clip)


def LBFGS(
    learning_rate: float = 1.0,
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 1e-9,
    history_size: int = 100,
    line_search_fn: str | None = None,
    parameters: Parameters = None,
    weight_decay: Decay = None,
    grad_clip: GradientClip | None = None,
    name: str | None = None,
) -> Optimizer:
    """Returns ``torch.optim.LBFGS``; ``step(closure)`` runs the closure several times.

    Raises UnsupportedOptionError for ``weight_decay`` and ``grad_clip``, which act once per update in the other
    optimizers: put the penalty into the closure's loss, and clip in the closure, after ``backward()``.
    """
    for label, value in (("weight_decay", weight_decay), ("grad_clip", grad_clip)):
        if value is not None:
            raise UnsupportedOptionError(
                f"LBFGS({label}={value!r}) is not supported: one step evaluates several gradients. Put it into the "
                "closure: add a penalty to the loss, or clip after backward()."
            )
    groups = checked(learning_rate, parameters, None, None)
    if len(groups) > 1 or groups[0]["weight_decay"] or "lr" in groups[0]:
        raise ConfigError("LBFGS takes parameters as one list, without groups: it keeps one history over all of them.")
    # The parameters, not the group: LBFGS has no weight_decay, which the group carries.
    return torch.optim.LBFGS(
        groups[0]["params"],
        learning_rate,
        max_iter,
        max_eval,
        tolerance_grad,
        tolerance_change,
        history_size,
        line_search_fn,
    )


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
    always_adapt: bool = False,
    name: str | None = None,
) -> OptimizerWrapper:
    """Returns LAMB as ``strategy.lamb`` applies it, for a script that names the optimizer itself."""
    if exclude_from_weight_decay_fn is not None:
        raise UnsupportedOptionError(
            "Lamb(exclude_from_weight_decay_fn=...) takes Paddle's parameters. Use torch.optim.Adam with "
            "strategy.lamb = True and lamb_configs['exclude_from_weight_decay'], which uses torch's names."
        )
    if always_adapt:
        raise UnsupportedOptionError("Lamb(always_adapt=True) is not supported; omit it.")
    adam = Adam(learning_rate, beta1, beta2, epsilon, parameters, None, grad_clip, multi_precision=multi_precision)
    if any(group["weight_decay"] or "l1_decay" in group for group in adam.param_groups):
        raise ConfigError("Lamb takes one decay, lamb_weight_decay; omit weight_decay from the groups.")
    unused: Any = None
    return LambAdam(adam, "lamb", unused, None, decay=lamb_weight_decay)


def Muon(
    parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
    lr: float = 0.02,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
    *,
    adamw_lr: float = 3e-4,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-10,
    adamw_weight_decay: float = 0.0,
    ns_dtype: torch.dtype = torch.bfloat16,
    grad_clip: GradientClip | None = None,
) -> Optimizer:
    """Returns Muon for matrices and AdamW for everything else, in one optimizer; equal on every mesh.

    It is meant for the hidden weights of a model. Embeddings and the last layer are matrices too and train better with
    AdamW, so give them in a group of their own with ``"use_muon": False``. With sharding stage 1 an update needs no
    further exchange; a weight that is divided over ``mp`` is gathered for it.

    Source: Keller Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks,
    kellerjordan.github.io/posts/muon; the rule of ``torch.optim.Muon``.

    Args:
        parameters: parameters, or groups in torch's form, with ``use_muon`` for Muon or AdamW; without it, parameters
            of two dims take Muon. A group may set ``lr``, ``weight_decay`` and its rule's other settings.
        lr: learning rate of Muon.
        momentum: momentum of Muon.
        nesterov: look one step ahead.
        ns_steps: Newton-Schulz iterations.
        weight_decay: decoupled decay of Muon.
        adamw_lr: learning rate of AdamW.
        adamw_betas: its betas.
        adamw_eps: its epsilon.
        adamw_weight_decay: its decay.
        ns_dtype: the dtype of the iterations.
        grad_clip: clips before each update.

    Example:
        >>> body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        >>> groups = [{"params": body.parameters()}, {"params": head.parameters(), "use_muon": False}]
        >>> optimizer = fleet.optimizer.Muon(groups, lr=0.02)
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("adamw_lr", adamw_lr), ("momentum", momentum)):
        if not number(name, value) >= 0 or (name == "momentum" and value >= 1):
            rule = "at least 0 and below 1" if name == "momentum" else "at least 0"
            raise ConfigError(f"Muon({name}={value!r}): it must be {rule}.")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 1:
        raise ConfigError(f"Muon(ns_steps={ns_steps!r}): it must be an integer of at least 1.")
    muon = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "weight_decay": weight_decay}
    adamw = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay}
    return with_steps_before(MuonRule(muon_groups(parameters), muon, adamw, ns_dtype), grad_clip)
