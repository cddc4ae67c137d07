"""Units of a sharded model: the modules whose parameters are gathered, and whose gradients are divided, at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fleet.errors import ConfigError, did_you_mean
from fleet.strategies._declare.optimizer_kinds import whole_only
from fleet.strategies._shared.muon import MuonRule
from fleet.strategies._shared.parts import is_part

# These read the parameters of their children without calling them, so the children cannot be units.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# A child smaller than this part of the limit stays with the module around it: a message for it alone costs more than
# it saves.
_SMALL = 16


def plan_units(model: nn.Module, limit_bytes: float) -> list[str]:
    """Returns the qualified names of the units of ``model`` by size, inner ones first; the root is always one more.

    Units are the largest modules that hold at most ``limit_bytes`` of parameters. A larger module is divided into its
    children; a child below a sixteenth of the limit stays in the unit around it while that unit keeps to the limit.
    Never units are modules without a ``forward``, modules that share a parameter with the rest of the model, and parts
    of a module that reads them without calling them. A module that a unit shares with the rest of the model is a unit.
    """
    return _with_shared(model, [name for name in _units_below("", model, limit_bytes, _outside_uses(model)) if name])


def find_anchors(model: nn.Module, anchors: Sequence[str]) -> list[str]:
    """Returns ``anchors``, and modules that they share, in the order in which they can be divided: inner ones first.

    Raises ConfigError for a name that is no module, a module without ``forward``, or a module that shares a parameter
    with a module outside it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    outside = _outside_uses(model)
    for anchor in anchors:
        label = f"sharding_configs['segment_anchors'] has {anchor!r}"
        if not anchor or anchor not in modules:
            names = ", ".join(name for name in list(modules)[:12] if name)
            near = did_you_mean(anchor, modules) or f" Modules: {names}."
            raise ConfigError(f"{label}, which names no module.{near}")
        if not _runs(modules[anchor]):
            raise ConfigError(f"{label}, a {type(modules[anchor]).__name__} without forward. Name the modules in it.")
        shared = _shared(modules[anchor], outside)
        if shared:
            raise ConfigError(
                f"{label}, which shares the parameter {shared!r} with a module outside it. Name a module that holds "
                "both, or none of them."
            )
    return _with_shared(model, sorted(set(anchors), key=lambda name: (-name.count("."), list(modules).index(name))))


def check_any_stage(optimizer: Optimizer) -> None:
    """Raises ConfigError when ``optimizer`` cannot work on a part of the parameters at all."""
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "sharding cannot divide torch.optim.LBFGS: its state is one history over all parameters together. Use an "
            "optimizer that updates each parameter by itself, or turn sharding off."
        )


def check_divided(optimizer: Optimizer) -> None:
    """Raises ConfigError when ``optimizer`` needs whole gradients and state, which stages 2 and 3 do not keep."""
    found = whole_only(optimizer)
    if found is None and isinstance(optimizer, MuonRule):
        found = "fleet.optimizer.Muon", "it orthogonalizes the update of a whole matrix"
    if found is not None:
        raise ConfigError(
            f"sharding stages 2 and 3 divide the update of each parameter, and {found[0]} needs it whole: {found[1]}. "
            "Set sharding_configs['stage'] to 1, which gives whole parameters to workers, or use another optimizer."
        )


def check_apart(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ConfigError when two parameters share memory: two workers would own the same numbers."""
    held: dict[int, list[tuple[int, int, str]]] = {}
    for name, p in named:
        if not is_part(p) and p.layout == torch.strided and not isinstance(p, nn.parameter.UninitializedParameter):
            start = int(p.storage_offset())
            held.setdefault(p.untyped_storage()._cdata, []).append((start, start + p.numel(), name))
    # If any two ranges overlap, so do two neighbours in the order of their starts.
    for ranges in held.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(ranges)):
            if start < end:
                raise ConfigError(
                    f"sharding: {one!r} and {other!r} are two parameters in the same memory, and each gets an owner of "
                    "its own. Tie them by assigning the parameter itself (a.weight = b.weight), or make one a clone()."
                )


def check_divisible(model: nn.Module, stage: int) -> None:
    """Raises ConfigError when ``stage`` 2 or 3 cannot divide a parameter of ``model``, or its gradient."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and stage == 3:
            raise ConfigError(
                f"sharding stage 3 puts hooks on modules, and {name or 'the model'!r} is a compiled script "
                "(torch.jit), which takes none. Use the module it was made from, or set sharding_configs['stage'] to 1."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"sharding stages 2 and 3 divide dense gradients, and {name!r} has sparse=True. Set it to False, or "
                "sharding_configs['stage'] to 1."
            )
    for name, parameter in model.named_parameters():
        if is_part(parameter):
            raise ConfigError(
                f"sharding: {name!r} belongs to a model that was divided before. Wrap both in one module, in one call "
                "of distributed_model(), or set sharding_configs['stage'] to 1."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"sharding: {name!r} has no shape yet. Run one batch before distributed_model().")
        if parameter.dim() == 0:
            raise ConfigError(
                f"sharding stages 2 and 3 divide gradients along their first dim, and {name!r} is a scalar. Give it "
                "the shape (1,), or set sharding_configs['stage'] to 1."
            )


def check_types(model: nn.Module, units: Sequence[str]) -> None:
    """Raises ConfigError when one of ``units``, inner ones first, or the rest of ``model`` trains two types."""
    seen: set[int] = set()
    # A parameter goes with the innermost unit around it, so outer units count only the types of the rest.
    for unit in (*units, ""):
        trained = [(name, p) for name, p in model.get_submodule(unit).named_parameters(unit) if p.requires_grad]
        types = {p.dtype: name for name, p in trained if id(p) not in seen}
        seen |= {id(p) for _, p in trained}
        if len(types) > 1:
            found = " and ".join(f"{name!r} is {str(dtype).removeprefix('torch.')}" for dtype, name in types.items())
            raise ConfigError(
                f"sharding stage 3 sends the gradients of a unit together, in one type, and {found} in the "
                f"unit {unit or 'of the whole model'!r}. Give all parameters one type (amp computes in 16 bit with "
                "float32 parameters), name modules of one type in sharding_configs['segment_anchors'], or set "
                "sharding_configs['stage'] to 1."
            )


def bytes_of(parameters: Iterator[nn.Parameter]) -> int:
    """Returns the bytes of ``parameters``, each counted once."""
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in parameters}.values())


def _units_below(name: str, module: nn.Module, limit_bytes: float, outside: dict[int, int]) -> list[str]:
    """Returns the units inside ``module``, and ``module`` itself last where it is one."""
    size = bytes_of(module.parameters())
    free = _runs(module) and not _shared(module, outside)
    if not size or (free and (size <= limit_bytes or isinstance(module, _WHOLE))):
        return [name] if size else []
    found: list[str] = []
    small: list[tuple[str, nn.Module]] = []
    kept = bytes_of(module.parameters(recurse=False))
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        child_bytes = bytes_of(child.parameters())
        if child_bytes < limit_bytes / _SMALL:
            small.append((full, child))
            kept += child_bytes
        else:
            found += _units_below(full, child, limit_bytes, outside)
    # Too much is left over for one gather, so small children become units after all.
    if kept > limit_bytes:
        for full, child in small:
            found += _units_below(full, child, limit_bytes, outside)
            kept -= bytes_of(child.parameters())
    return [*found, name] if free and kept else found


def _with_shared(model: nn.Module, units: Sequence[str]) -> list[str]:
    """Returns ``units``, each module once, behind the modules in them that the rest of ``model`` uses too."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places = Counter(map(id, modules.values()))
    found: dict[int, str] = {}
    for unit in units:
        inside = dict(modules[unit].named_modules(remove_duplicate=False))
        times = Counter(map(id, inside.values()))
        shared = ""
        # Used more often in the model than inside this unit: the rest would find it divided while the unit is not
        # running. Its inner modules need no unit then, for it is gathered whole.
        for name, module in inside.items():
            is_elsewhere = places[id(module)] != places[id(modules[unit])] * times[id(module)]
            is_in_shared = bool(shared) and name.startswith(f"{shared}.")
            if is_elsewhere and not is_in_shared and _runs(module) and bytes_of(module.parameters()):
                shared = name
                found.setdefault(id(module), f"{unit}.{name}")
        found.setdefault(id(modules[unit]), unit)
    return list(found.values())


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _outside_uses(model: nn.Module) -> dict[int, int]:
    """Returns how many modules of ``model`` hold each parameter, by its identity."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _shared(module: nn.Module, uses: dict[int, int]) -> str:
    """Returns the name of a parameter of ``module`` that modules outside it hold too, or ''."""
    own = _outside_uses(module)
    return next((name for name, p in module.named_parameters() if own[id(p)] != uses[id(p)]), "")
