"""Optimizer states of Paddle (``.pdopt``) as torch's.

[Note: How the states correspond]
A file has one array for each parameter and quantity, ``linear_0.w_0_moment1_0``: Paddle's own name of the parameter,
the quantity, a count. With master weights, ``_fp32_master_0`` stands between. Moments lie as their weights do.

The step count t is nowhere; Adam's kinds keep ``beta1_pow = beta1^(t+1)`` and ``beta2_pow = beta2^(t+1)``, the factors
of their next step, multiplied up in float32. So ``t = round(log(beta1_pow) / log(beta1)) - 1``, and the same from beta2
once beta1_pow is below 1e-30, where float32 has few digits left; 0 in both means that the bias correction has ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.checkpoint.paddle_files.paddle_names import entries_of
from fleet.checkpoint.paddle_files.paddle_pickle import PaddleState, read_paddle
from fleet.checkpoint.paddle_files.paddle_state import map_for
from fleet.errors import CheckpointError
from fleet.optimizer import Adamax, RMSProp
from fleet.strategies._shared.optimizer_wrapper import innermost

_POWERS = ("beta1_pow_acc", "beta2_pow_acc")
_ADAM = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
_QUANTITY = re.compile(r"(?:_fp32_master_[0-9]+)?_([a-z_0-9]*[a-z][0-9]?)_[0-9]+")
_RATE = re.compile(r"learning_rate_[0-9]+")
_FEW_DIGITS = 1e-30


@dataclass(frozen=True)
class _StateRule:
    """How the state of one kind of optimizer corresponds.

    Attributes:
        paddle: what Paddle calls it.
        names: Paddle's quantities to torch's.
        unused: quantities that Paddle keeps and does not use with these settings.
        counts: ``"powers"`` of the betas, ``"zero"``: a step count that only starts, ``""``: none.
    """

    paddle: str
    names: Mapping[str, str]
    unused: tuple[str, ...] = ()
    counts: str = ""


def paddle_optimizer_state(
    path: str | Path, optimizer: Optimizer, model: nn.Module, *, parameters: str | Path | None = None,
    name_map: Mapping[str, str] | str | Path | None = None, key: str | None = None, parameters_key: str | None = None,
    keep_rates: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the state of a ``.pdopt`` file as ``optimizer.load_state_dict`` takes it; changes nothing.

    Moments are transposed as their weights are. The step count follows from ``beta1_pow`` (see the module's docstring).
    Paddle's optimizers and torch's: Adam, AdamW, Lamb (``fleet.optimizer.Lamb``), Adamax and RMSProp (those of
    ``fleet.optimizer``), Momentum (``torch.optim.SGD`` with momentum), SGD, Adagrad. Settings are not in the file, so
    those of ``optimizer`` stay, except the learning rate where the file has one: ``last_lr`` of its scheduler, or that
    of a static program. Read the scheduler's own state from ``read_paddle(path)["LR_Scheduler"]``.

    Args:
        path: the file.
        optimizer: the torch optimizer of ``model``, of the same kind and settings, not wrapped by a strategy yet.
        model: the model that took the parameters.
        parameters: the ``.pdparams`` file of the same save, which has the parameters' own names; by default the one
            beside ``path``.
        name_map: as for :func:`paddle_state`.
        key: which entry of ``path`` is the optimizer's state, if it holds several dictionaries.
        parameters_key: the same for ``parameters``.
        keep_rates: True keeps the learning rates of ``optimizer``.

    Raises:
        CheckpointError: the file is of another optimizer, other settings, other parameters or other shapes, or master
            weights differ from the model's.

    Example:
        >>> model.load_state_dict(fleet.checkpoint.paddle_state("model.pdparams", model=model))
        <All keys matched successfully>
        >>> optimizer.load_state_dict(fleet.checkpoint.paddle_optimizer_state("model.pdopt", optimizer, model))
    """
    saved = read_paddle(path, key)
    if parameters is None:
        parameters = Path(path).with_suffix(".pdparams") if Path(path).suffix == ".pdopt" else path
    arrays = read_paddle(parameters, parameters_key)
    names = map_for(arrays, name_map, model, str(parameters))
    own = {ours: arrays.parameter_names.get(theirs, theirs) for ours, theirs in names.items()}
    state = _states(saved, own, optimizer, model, str(path))
    groups = optimizer.state_dict()["param_groups"]
    if not keep_rates:
        _put_rate(groups, saved, str(path))
    return {"state": state, "param_groups": groups}


def _states(
    saved: PaddleState, own: Mapping[str, str], optimizer: Optimizer, model: nn.Module, label: str
) -> dict[int, dict[str, Any]]:
    """Returns the state at each place; ``own`` has Paddle's own name of each entry of the model."""
    found = _by_parameter(saved, set(own.values()), label)
    entries = entries_of(model)
    places = _places(optimizer, model)
    _check_masters(saved, own, {name: (entries[name].is_transposed, p) for name, _, p in places}, label)
    states: dict[int, dict[str, Any]] = {}
    for place, (name, group, parameter) in enumerate(places):
        quantities = found.get(own[name], {})
        if not quantities:
            continue  # the parameter has had no gradient yet
        where = f"{label}: {own[name]} ({name})"
        made = _state_of(_rule_of(optimizer, group), quantities, group, where)
        states[place] = {
            ours: value if ours == "step" else _like(parameter, value, entries[name].is_transposed, f"{where}: {ours}")
            for ours, value in made.items()
        }
    return states


def _places(optimizer: Optimizer, model: nn.Module) -> list[tuple[str, dict[str, Any], Tensor]]:
    """Returns name, group and parameter at each place of the optimizer's state."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    places = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError("A parameter of optimizer is not in model. Pass the model that it trains.")
            places.append((names[id(parameter)], group, parameter))
    return places


def _by_parameter(saved: PaddleState, own_names: set[str], label: str) -> dict[str, dict[str, Tensor]]:
    """Returns the quantities of each parameter; raises CheckpointError for an array that is none of them."""
    # The name of one parameter may be the beginning of another's: the longest that fits owns the array.
    longest_first = sorted(own_names, key=len, reverse=True)
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in saved.tensors().items():
        if _RATE.fullmatch(name):
            continue
        for own in longest_first:
            match = _QUANTITY.fullmatch(name, len(own)) if name.startswith(own) else None
            if match:
                if match[1] in found.setdefault(own, {}):
                    raise CheckpointError(f"{label} has {match[1]} of {own!r} twice.")
                found[own][match[1]] = value
                break
        else:
            raise CheckpointError(
                f"{label} has {name!r}, which belongs to no parameter of the model; Paddle calls those "
                f"{sorted(own_names)[:5]}. The .pdparams file must be of the same save (parameters=...)."
            )
    return found


def _rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> _StateRule:
    optimizer = innermost(optimizer)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        largest = {"moment2_max": "max_exp_avg_sq"} if group["amsgrad"] else {}
        return _StateRule("Adam, AdamW or Lamb", _ADAM | largest, counts="powers")
    if isinstance(optimizer, Adamax):
        return _StateRule("Adamax", {"moment": "exp_avg", "inf_norm": "exp_inf"}, counts="powers")
    if isinstance(optimizer, torch.optim.SGD):
        return _StateRule("Momentum", {"velocity": "momentum_buffer"}) if group["momentum"] else _StateRule("SGD", {})
    if isinstance(optimizer, torch.optim.Adagrad):
        if group["lr_decay"]:
            raise CheckpointError("Adagrad(lr_decay=...) counts steps, and Paddle's Adagrad does not. Omit lr_decay.")
        return _StateRule("Adagrad", {"moment": "sum"}, counts="zero")
    if isinstance(optimizer, RMSProp):
        names = {"mean_square": "square_avg"}
        optional = {"mean_grad": ("grad_avg", "centered"), "momentum": ("momentum_buffer", "momentum")}
        names |= {theirs: ours for theirs, (ours, setting) in optional.items() if group[setting]}
        return _StateRule("RMSProp", names, tuple(theirs for theirs in optional if theirs not in names))
    raise CheckpointError(
        f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}; states of Paddle can be taken over "
        "by torch.optim.Adam, AdamW, SGD and Adagrad, and by RMSProp, Adamax and Lamb of fleet.optimizer (torch's "
        "RMSprop and Adamax have epsilon in another place)."
    )


def _state_of(
    rule: _StateRule, quantities: Mapping[str, Tensor], group: Mapping[str, Any], label: str
) -> dict[str, Any]:
    powers = [name for name in _POWERS if name in quantities]
    moments = set(quantities) - set(powers) - set(rule.unused)
    if moments != set(rule.names) or bool(powers) != (rule.counts == "powers"):
        raise CheckpointError(
            f"{label} has {sorted(quantities) or 'no state'}; with the settings of optimizer, Paddle's {rule.paddle} "
            f"keeps {sorted(rule.names) or 'none'}. Make the optimizer as the script in Paddle did."
        )
    made: dict[str, Any] = {}
    if rule.counts:
        made["step"] = torch.tensor(float(_steps(quantities, group, label)) if powers else 0.0)
    return made | {ours: quantities[theirs] for theirs, ours in rule.names.items()}


@dataclass(frozen=True)
class _Power:
    """One ``beta^(t+1)``: ``exact`` is t + 1 as a number with digits, ``error`` how far it may be off."""

    name: str
    power: float
    exact: float
    error: float


def _steps(quantities: Mapping[str, Tensor], group: Mapping[str, Any], label: str) -> int:
    """Returns t from the powers of the betas; raises CheckpointError where they are not those of the betas."""
    betas = tuple(float(beta) for beta in group["betas"])
    rule = f"Give optimizer the betas of the script in Paddle; it has {betas}."
    powers = [
        _power_of(name, quantities[name], beta, label)
        for name, beta in zip(_POWERS, betas, strict=True)
        if name in quantities
    ]
    sure = [found for found in powers if found.power >= _FEW_DIGITS]
    for found in sure:
        if abs(found.exact - round(found.exact)) > 0.25 + found.error:
            raise CheckpointError(f"{label}: {found.name} is {found.power:.9g}, no power of its beta. {rule}")
    if len(sure) == 2 and abs(sure[0].exact - sure[1].exact) > 0.5 + sure[0].error + sure[1].error:
        raise CheckpointError(
            f"{label}: {sure[0].name} says {sure[0].exact - 1:.1f} steps, {sure[1].name} {sure[1].exact - 1:.1f}. "
            f"{rule}"
        )
    if sure:
        return max(0, round(sure[0].exact) - 1)
    # Nothing is left of both, so both corrections are 1 in float32; the step count must say the same.
    slowest = max(betas)
    return math.ceil(math.log(_FEW_DIGITS) / math.log(slowest)) if 0 < slowest < 1 else 1


def _power_of(name: str, tensor: Tensor, beta: float, label: str) -> _Power:
    power = float(tensor.reshape(-1)[0]) if tensor.numel() == 1 else math.nan
    if not 0 <= power < 1:
        raise CheckpointError(f"{label}: {name} is {power}; it must be one number of at least 0 and below 1.")
    if power == 0 or not 0 < beta < 1:
        return _Power(name, 0.0, math.inf, math.inf)
    exact = math.log(power) / math.log(beta)
    return _Power(name, power, exact, exact * 2**-23 / -math.log(beta))


def _like(parameter: Tensor, value: Tensor, is_transposed: bool, label: str) -> Tensor:
    """Returns a moment as it lies beside its parameter."""
    turned = value.t().contiguous() if is_transposed and value.dim() == 2 else value
    if turned.shape != parameter.shape:
        raise CheckpointError(
            f"{label} is {list(turned.shape)}; the parameter of the model is {list(parameter.shape)}."
        )
    return turned


def _check_masters(
    saved: PaddleState, own: Mapping[str, str], parameters: Mapping[str, tuple[bool, Tensor]], label: str
) -> None:
    """Raises CheckpointError where a float32 parameter differs from its master weight: it was loaded without it."""
    masters = saved.get("master_weights")
    if not isinstance(masters, PaddleState):
        return
    for name, (is_transposed, parameter) in parameters.items():
        master = masters.get(own[name])
        if not isinstance(master, Tensor) or parameter.dtype != master.dtype:
            continue
        whole = master.t() if is_transposed and master.dim() == 2 else master
        if whole.shape != parameter.shape or not torch.equal(whole, parameter.detach().cpu()):
            raise CheckpointError(
                f"{label} has master weights, and {name!r} of the model differs from its own. Load the model with "
                f"paddle_state(..., masters={label!r}) first."
            )


def _put_rate(groups: list[dict[str, Any]], saved: PaddleState, label: str) -> None:
    schedule = saved.get("LR_Scheduler")
    rate = schedule.get("last_lr") if isinstance(schedule, PaddleState) else None
    if rate is None:
        found = [value for name, value in saved.tensors().items() if _RATE.fullmatch(name) and value.numel() == 1]
        if not found:
            return
        rate = float(found[0])
    # Groups may scale the rate by a factor, and the file has the rate before that.
    own = {float(f"{group['lr'] / group.get('lr_factor', 1.0):.9g}") for group in groups}
    if not isinstance(rate, float | int) or len(own) > 1:
        raise CheckpointError(
            f"{label} has the learning rate {rate!r}; the groups of optimizer have {sorted(own)}. Pass keep_rates=True "
            "and set the rates of the groups yourself."
        )
    for group in groups:
        group["lr"] = float(rate) * group.get("lr_factor", 1.0)
