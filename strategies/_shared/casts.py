"""The 16-bit type that amp computes in, and values cast together with everything in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fleet.strategies._declare.fields import Values

_T = TypeVar("_T")
_CAST = (torch.float16, torch.bfloat16, torch.float32)  # as autocast, which leaves float64 alone


def narrow_type(config: Any, device_type: str) -> torch.dtype:
    """Returns the 16-bit type that ``config`` asks for; by default float16 on a GPU and bfloat16 on the CPU."""
    if config.use_pure_fp16 or config.dtype == "float16":
        return torch.float16
    if config.use_pure_bf16 or config.dtype == "bfloat16":
        return torch.bfloat16
    return torch.float16 if device_type == "cuda" else torch.bfloat16


def scales_gradients(options: Values, device_type: str) -> bool:
    """Returns whether amp may scale the backward signal on such a device: whether it computes in float16."""
    return bool(options["amp"]) and narrow_type(options["amp_configs"], device_type) is torch.float16


def cast_tensor(tensor: Any, dtype: torch.dtype) -> Any:
    """Returns ``tensor`` in ``dtype``; None, and types that autocast leaves alone, unchanged."""
    return tensor.to(dtype) if tensor is not None and tensor.dtype in _CAST else tensor


def cast_floating(value: _T, dtype: torch.dtype) -> _T:
    """Returns ``value`` with each floating tensor in it, other than float64, in ``dtype``."""
    return cast(_T, map_tensors(value, lambda t: cast_tensor(t, dtype)))


def nested_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in ``value``, nested containers included."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns ``value`` with ``change`` applied to each tensor in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        return _with(value, {k: v for k, v in changed.items() if v is not value[k]}, "__setitem__")
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        names = [name for name in value.__dataclass_fields__ if hasattr(value, name)]
        changed = {name: map_tensors(getattr(value, name), change) for name in names}
        return _with(value, {k: v for k, v in changed.items() if v is not getattr(value, k)}, "__setattr__")
    return value


def _with(value: Any, changes: dict[Any, Any], how: str) -> Any:
    """Returns a copy of ``value`` with ``changes``; ``value`` itself when there are none."""
    if not changes:
        return value
    if type(value) is dict:
        return {**value, **changes}
    copied = copy.copy(value)
    for key, item in changes.items():
        if how == "__setattr__":
            object.__setattr__(copied, key, item)  # frozen dataclasses too: the copy is not shared yet
        else:
            copied[key] = item
    return copied
