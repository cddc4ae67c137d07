"""From a torch optimizer to the rule by which servers update: the user's hyper-parameters, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.ps.table.rules import LEARNING_RATE, Rule

SERVED_OPTIMIZERS = "torch.optim.SGD (with momentum or without), Adam, Adagrad and SparseAdam"
Group = Mapping[str, Any]


def rule_of_group(optimizer: Optimizer, group: Group) -> Rule:
    """Returns the rule that updates as ``optimizer`` would update the parameters of ``group``.

    The learning rate is the one before any schedule (``initial_lr``), so that a restarted script makes the same tables;
    the current rate is sent with the first step.

    Raises:
        UnsupportedOptionError: the servers have no such rule.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, momentum=0.9)
        >>> rule_of_group(sgd, sgd.param_groups[0]).name
        'momentum'
    """
    make = _RULES.get(type(optimizer))
    if make is None:
        raise UnsupportedOptionError(
            f"distributed_optimizer({type(optimizer).__name__}): the parameter servers update, but they have no rule "
            f"for it. Use {SERVED_OPTIMIZERS}."
        )
    for name in ("amsgrad", "maximize"):
        if group.get(name):
            _refuse(optimizer, f"{name}=True", f"the servers' rules do not support {name}. Leave it False.")
    name, hyper = make(optimizer, group)
    rate = {LEARNING_RATE: float(group.get("initial_lr", group["lr"]))}
    try:
        return Rule(name, {**rate, **{key: float(value) for key, value in hyper.items()}})
    except ConfigError as error:
        raise ConfigError(f"distributed_optimizer({type(optimizer).__name__}): {error}") from None


def check_geo_optimizer(optimizer: Optimizer) -> None:
    """Raises ConfigError unless geo training can run ``optimizer``: plain SGD, whose rows carry no state."""
    if type(optimizer) is not torch.optim.SGD:
        raise ConfigError(
            f"distributed_optimizer({type(optimizer).__name__}): geo training (a_sync_configs['k_steps'] above 0) adds "
            "up differences of weights that workers trained alone, which is exact for SGD only. Use torch.optim.SGD."
        )
    for group in optimizer.param_groups:
        for name in ("momentum", "maximize", "weight_decay"):
            if group.get(name):
                _refuse(
                    optimizer,
                    f"{name}={group[name]!r}",
                    "geo training keeps no optimizer state and applies the plain gradient. Omit it.",
                )


def _sgd(optimizer: Optimizer, group: Group) -> tuple[str, dict[str, Any]]:
    if group["dampening"]:
        _refuse(optimizer, f"dampening={group['dampening']!r}", "the servers' momentum has no dampening. Leave it 0.")
    if not group["momentum"]:
        return "sgd", {"weight_decay": group["weight_decay"]}
    return "momentum", {
        "momentum": group["momentum"], "nesterov": group["nesterov"], "weight_decay": group["weight_decay"]
    }  # fmt: skip


def _adam(optimizer: Optimizer, group: Group) -> tuple[str, dict[str, Any]]:
    beta1, beta2 = group["betas"]
    decay = group.get("weight_decay", 0.0)
    decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
    if decay and decoupled:
        _refuse(
            optimizer,
            f"weight_decay={decay!r}",
            "the servers' Adam adds the decay to the gradient. Use torch.optim.Adam, or weight_decay=0.",
        )
    return "adam", {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"], "weight_decay": decay}


def _adagrad(optimizer: Optimizer, group: Group) -> tuple[str, dict[str, Any]]:
    if group["lr_decay"]:
        _refuse(optimizer, f"lr_decay={group['lr_decay']!r}", "rows are updated at different times. Leave it 0.")
    return "adagrad", {
        "epsilon": group["eps"],
        "initial_accumulator": group["initial_accumulator_value"],
        "weight_decay": group["weight_decay"],
    }


def _refuse(optimizer: Optimizer, setting: str, reason: str) -> None:
    raise UnsupportedOptionError(
        f"distributed_optimizer({type(optimizer).__name__}({setting})) cannot be honoured by the servers: {reason}"
    )


_RULES: dict[type[Optimizer], Callable[[Optimizer, Group], tuple[str, dict[str, Any]]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SparseAdam: _adam,
    torch.optim.Adagrad: _adagrad,
}
