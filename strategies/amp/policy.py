"""The type in which each module computes: the lists of ``amp_configs``, pure 16 bit, and the kept parameters.

[Note: Float32 parameters]
In pure float16 or bfloat16 the parameters that the user, the optimizer, data parallel and checkpoints see stay in
float32: they are the master weights. A module computes with 16-bit copies that exist while its forward runs (and as
long as backward needs them); autograd turns their gradients into float32 ones. So gradients are unscaled, exchanged,
clipped and merged in float32, a scaled float16 gradient never has to be stored unscaled in float16, where its small
values would be lost, and parts outside ``fp16_guard()`` can use the same parameters in float32. The memory holds 16-bit
parameters, float32 gradients and master weights. ``use_optimizer_fp16`` drops the master weights: the parameters
themselves are 16-bit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fleet.errors import ConfigError, did_you_mean
from fleet.strategies._shared.parameter_layout import is_stage
from fleet.strategies._shared.stages import on_some_stage
from fleet.strategies.amp.amp_model import Treatment

if TYPE_CHECKING:
    from fleet.job.job import Job

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)
_NORM_NAME = re.compile(r"Norm(\d?[dD])?$")  # of a user's own classes: LlamaRMSNorm, LayerNorm2d


def plan_treatments(model: nn.Module, config: Any, dtype: torch.dtype, *, pure: bool) -> dict[str, Treatment]:
    """Returns the treatment of each module that needs one, by qualified name; the model itself is ``""``.

    A qualified name stands above a class name, and a list above the parts of a module that is listed as a whole.

    Raises:
        ConfigError: a list names nothing in the model, or a module stands in both lists.
    """
    white = _named("custom_white_list", model, config.custom_white_list)
    black = _named("custom_black_list", model, config.custom_black_list)
    owners = _owners(model, config.custom_black_varnames)
    for name in white.keys() & black.keys():
        if white[name] == black[name]:
            raise ConfigError(
                f"amp_configs['custom_white_list'] and ['custom_black_list'] both name {white[name]!r}. "
                "Keep it in one of them."
            )
    found: dict[str, Treatment] = {}
    lists: dict[str, str] = {}  # by module: the list that decides for it, its own or its parent's
    for name, module in model.named_modules():
        lists[name] = _list_of(name, white, black, lists)
        treatment = _treatment(module, lists[name], name in white or name in black, dtype, pure)
        if name in owners:
            treatment = Treatment(autocast=False, inputs=torch.float32, parameters=torch.float32)
        elif name.rpartition(".")[0] in owners and name and lists[name] != "black":
            treatment = _resumed(treatment or Treatment())
        if treatment is not None:
            found[name] = treatment
    return found


def _list_of(name: str, white: dict[str, str], black: dict[str, str], lists: dict[str, str]) -> str:
    if name in white and name in black:
        return "white" if white[name] == name else "black"
    if name in white:
        return "white"
    if name in black:
        return "black"
    return lists.get(name.rpartition(".")[0], "") if name else ""


def _resumed(treatment: Treatment) -> Treatment:
    """Returns ``treatment`` for a part of a module whose own operations compute in float32."""
    autocast = True if treatment.autocast is None else treatment.autocast
    return replace(treatment, autocast=autocast, resumes=True)


def _treatment(module: nn.Module, kind: str, listed: bool, dtype: torch.dtype, pure: bool) -> Treatment | None:
    """Returns the treatment of ``module``; ``kind`` is its list, ``listed`` whether it has its own entry there."""
    wide = torch.float32
    if kind == "black":
        return Treatment(autocast=False, inputs=wide, parameters=wide, always=True) if listed else None
    if kind == "white":
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return Treatment(outputs=dtype, parameters=wide, always=True)
        # Recurrent modules hold their parameters in a list of their own, which autocast reaches.
        if isinstance(module, nn.RNNBase):
            return Treatment(autocast=True, inputs=dtype, always=True)
        return Treatment(autocast=False, inputs=dtype, parameters=dtype, always=True)
    if not pure:
        return None
    if is_norm(module):
        return Treatment(autocast=False, inputs=wide, parameters=wide, outputs="input")
    if not any(p is not None for p in module._parameters.values()):
        return None
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return Treatment(outputs=dtype)  # the same numbers as from a 16-bit table, without a copy of the table
    if isinstance(module, nn.RNNBase):
        return Treatment(inputs=dtype)
    return Treatment(inputs=dtype, parameters=dtype)


def is_norm(module: nn.Module) -> bool:
    """Returns whether ``module`` normalises: torch's classes, their subclasses, and classes named ``...Norm``."""
    return isinstance(module, _NORMS) or _NORM_NAME.search(type(module).__name__) is not None


def check_stages(model: nn.Module, config: Any, job: Job) -> None:
    """Raises ConfigError when a list names nothing on any stage of a pipeline; every stage must call it."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    modules = {name for name, _ in model.named_modules()}
    modules |= {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    asked = [
        (option, entry, entry in known)
        for option, known in (
            ("custom_white_list", modules),
            ("custom_black_list", modules),
            ("custom_black_varnames", names),
        )
        for entry in getattr(config, option)
    ]
    fits = on_some_stage([fitting for _, _, fitting in asked], job.axes)
    for (option, entry, _), fitting in zip(asked, fits, strict=True):
        if not fitting:
            raise ConfigError(f"amp_configs['{option}'] has {entry!r}, which is on no stage of the pipeline.")


def _named(option: str, model: nn.Module, entries: tuple[str, ...]) -> dict[str, str]:
    """Returns, for each module that ``entries`` name, the entry: a qualified name before a class name."""
    found: dict[str, str] = {}
    classes: dict[str, list[str]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
            classes.setdefault(kind.__name__, []).append(name)
    for entry in entries:
        if entry not in classes and entry not in modules and not is_stage(model):
            near = did_you_mean(entry, [*modules, *classes])
            raise ConfigError(
                f"amp_configs['{option}'] has {entry!r}, which is neither a qualified name nor a class of a module of "
                f"{type(model).__name__}.{near or ' Classes: ' + ', '.join(sorted(classes)[:12]) + '.'}"
            )
        # A class name fits many modules; the qualified names, which stand above it, are entered last.
        for name in classes.get(entry, ()):
            found.setdefault(name, entry)
    found.update({entry: entry for entry in entries if entry in modules})
    return found


def _owners(model: nn.Module, names: tuple[str, ...]) -> set[str]:
    """Returns the qualified names of the modules that own the parameters ``names``."""
    known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in names:
        if name not in known and not is_stage(model):
            near = did_you_mean(name, known)
            raise ConfigError(
                f"amp_configs['custom_black_varnames'] has {name!r}, which is no parameter of {type(model).__name__}."
                f"{near or ' Parameters: ' + ', '.join(known[:12]) + '.'}"
            )
    # A tied parameter has several names and owners, and all of them compute with it.
    wanted = [p for name, p in model.named_parameters(remove_duplicate=False) if name in names]
    tied = {name for name, p in model.named_parameters(remove_duplicate=False) if any(p is w for w in wanted)}
    return {name.rpartition(".")[0] for name in tied}


def has_guard(model: nn.Module) -> bool:
    """Returns whether the code of a module of ``model`` mentions ``fp16_guard``."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if kind is not nn.Module}
    functions = [f for kind in kinds if issubclass(kind, nn.Module) for f in vars(kind).values() if callable(f)]
    functions += [module.forward for module in model.modules() if "forward" in module.__dict__]
    return any("fp16_guard" in code.co_names + code.co_freevars for f in functions for code in _codes(f))


def _codes(function: Any) -> Iterator[CodeType]:
    """Yields the code of ``function``, unwrapped, and of the functions defined in it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    stack = [code] if code is not None else []
    while stack:
        current = stack.pop()
        yield current
        stack += [constant for constant in current.co_consts if isinstance(constant, CodeType)]
