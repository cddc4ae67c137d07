"""The state of an optimizer that a file has: whether it can be that of the parameters which are trained here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import CheckpointError
from fleet.ps.worker.dense_part import DensePart

__all__ = ["check_state_shapes"]


def check_state_shapes(label: str, state: Mapping[Any, Any], optimizer: Optimizer, parts: Sequence[DensePart]) -> None:
    """Raises CheckpointError where a tensor of ``state`` cannot be that of a parameter which is trained here.

    What the optimizer holds already has the right shape. Without it, torch's own optimizers keep tensors of the
    parameter's shape and plain numbers, but for those that keep sums over rows or of all parameters.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): part.name_of(number) for part in parts for number, p in enumerate(part.parameters)}
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_known = is_known and not isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor)
    for number, parameter in enumerate(held):
        own = optimizer.state.get(parameter, {})
        for key, value in state.get(number, {}).items() if id(parameter) in names else ():
            if not isinstance(value, Tensor):
                continue
            wanted = own.get(key)
            if not isinstance(wanted, Tensor):
                if not is_known or not value.ndim:
                    continue
                wanted = parameter
            if value.shape != wanted.shape and not value.numel() == wanted.numel() == 1:
                raise CheckpointError(
                    f"{label}: {key!r} of parameter {number}, {names[id(parameter)]}, has the shape "
                    f"{list(value.shape)}; {type(optimizer).__name__} keeps {list(wanted.shape)} for it here. Load a "
                    "save of this model. If only the optimizer differs, remove the file to begin with a new state."
                )
