"""The state of an optimizer that a file has: whether it can be that of the parameters which are trained here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import CheckpointError
from fleet.ps.worker.dense_part import DensePart

_REMEDY = "If only the optimizer differs, remove the file to begin with a new state."


def check_state(label: str, state: Mapping[Any, Any], optimizer: Optimizer, parts: Sequence[DensePart]) -> None:
    """Raises CheckpointError where ``state`` cannot be that of ``optimizer`` and the parameters it trains here.

    What the optimizer holds already has the right names and shapes. Without it, torch's own optimizers keep tensors of
    the parameter's shape and plain numbers, but for those that keep sums over rows or of all parameters.
    """
    names = {id(p): part.name_of(number) for part in parts for number, p in enumerate(part.parameters)}
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_known = is_known and not isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor)
    held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for number, (parameter, group) in enumerate(held):
        found = state.get(number, {})
        if id(parameter) not in names or not found:
            continue
        place = f"parameter {number}, {names[id(parameter)]},"
        own = optimizer.state.get(parameter, {})
        kept = set(own) or (_kept_by(optimizer, group) if is_known else None)
        if kept is not None and (not kept or kept - set(found)):
            raise CheckpointError(
                f"{label} has {_listed(set(found))} for {place} and {type(optimizer).__name__} keeps {_listed(kept)} "
                f"here: this is the state of another optimizer. Load a save of this job. {_REMEDY}"
            )
        for key, value in found.items():
            if not isinstance(value, Tensor):
                continue
            wanted = own.get(key)
            if not isinstance(wanted, Tensor):
                if not is_known or not value.ndim:
                    continue
                wanted = parameter
            if value.shape != wanted.shape and not value.numel() == wanted.numel() == 1:
                raise CheckpointError(
                    f"{label}: {key!r} of {place} has the shape {list(value.shape)}; {type(optimizer).__name__} keeps "
                    f"{list(wanted.shape)} for it here. Load a save of this model. {_REMEDY}"
                )


def _kept_by(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """Returns the names of what one of torch's optimizers keeps for a parameter; ``None`` where that is not known."""
    kind: Any = type(optimizer)
    options = {name: group[name] for name in inspect.signature(kind).parameters if name in group and name != "params"}
    one = torch.zeros(1, requires_grad=True)
    one.grad = torch.zeros(1)
    try:
        with torch.no_grad():
            alike = kind([one], **options)
            inspect.unwrap(kind.step)(alike)  # without the hooks that watch the steps of the job
    except (RuntimeError, TypeError, ValueError):  # it needs a GPU, a closure or sparse gradients
        return None
    return set(alike.state[one])


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
