"""Tensors beside a record, in files without pickle, and batches as JSON and tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors; formats that numpy lacks are written as their bytes, with the dtype in the name."""
    arrays = {}
    for name, tensor in tensors.items():
        # A copy: numpy pins memory that it shares, and fully_shard frees that of gathered parameters.
        plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        dtype = str(plain.dtype).removeprefix("torch.")
        known = dtype in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
        array = plain.numpy() if known else plain.view(torch.int16).numpy()
        arrays[f"{name}|{dtype}"] = array
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub takes the names for allow_pickle


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Returns what :func:`save_tensors` wrote."""
    found = {}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            name, _, dtype = key.partition("|")
            tensor = torch.from_numpy(arrays[key])
            wanted = getattr(torch, dtype)
            found[name] = tensor if tensor.dtype == wanted else tensor.view(wanted)
    return found


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """Returns the structure of a batch as JSON has it; its tensors are appended to ``tensors``.

    Raises:
        TypeError: the batch holds an object of another kind.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return {"array": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if type(value) is dict:
        return {"mapping": {str(key): pack(one, tensors) for key, one in value.items()}}
    fields = _fields_of(value)
    if fields is not None:
        return {"object": [f"{type(value).__module__}:{type(value).__qualname__}", pack(fields, tensors)]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [pack(one, tensors) for one in value]}
    raise TypeError(f"a {type(value).__name__} in the batches of a DataLoader")


def unpack(made: Mapping[str, Any], tensors: list[Tensor]) -> Any:
    """Returns the batch that :func:`pack` took apart."""
    ((kind, inside),) = made.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "array":
        return tensors[inside].numpy()
    if kind == "value":
        return inside
    if kind == "mapping":
        return {key: unpack(one, tensors) for key, one in inside.items()}
    if kind == "object":
        return _object_of(inside[0], unpack(inside[1], tensors))
    rows = [unpack(one, tensors) for one in inside]
    return tuple(rows) if kind == "tuple" else rows


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Returns the items of a mapping, a named tuple or a dataclass; None for other objects."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclass_fields(value) if field.init}
    return None


def _object_of(name: str, fields: dict[str, Any]) -> Any:
    """Returns an object of the class ``module:name``, whose methods a loop may call, as ``batch.to(device)``.

    The loop's own imports have loaded the class; a plain dict stands for one that is out of reach.
    """
    module, _, path = name.partition(":")
    made: Any = sys.modules.get(module)
    for part in path.split("."):
        made = getattr(made, part, None)
    if not isinstance(made, type):
        return fields
    is_mapping = issubclass(made, Mapping)
    build: Callable[..., Any] = made
    return build(fields) if is_mapping else build(**fields)
