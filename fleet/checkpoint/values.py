"""Values: the content of a checkpoint other than tensors, as JSON that gives back the same types.

JSON knows no tuples, sets, complex numbers or keys other than texts; those stand as ``{"$": kind, ...}``. A tensor
inside a value becomes a tensor of the checkpoint, and its place ``{"$": "tensor", "name": ...}``.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.checkpoint.index import DTYPES, MOST_DEPTH, tensor_names
from fleet.errors import CheckpointError, ConfigError

_KIND = "$"
_NUMBERS = (bool, int, float, complex)


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns ``value`` as JSON holds it; tensors and arrays in it are put into ``tensors`` by a name.

    Args:
        value: numbers, texts, ``None``, bytes, tensors, arrays; lists, tuples, sets, counters and dictionaries of them.
        name: name of the value; its tensors are called ``name/...`` after their place, numbered to stay unique.
        tensors: receives them; they share the memory of ``value`` where it is an array of this machine's byte order.

    Raises:
        ConfigError: something else is in it, which a reader could not make again without running code.

    Example:
        >>> encode({"betas": (0.9, 0.99)}, "group", {})
        {'betas': {'$': 'tuple', 'items': [0.9, 0.99]}}
    """
    try:
        encoded = _encoded(value, name, tensors)
        tensor_names(encoded)  # a reader would refuse what is deeper than this allows
    except (RecursionError, CheckpointError):
        raise _refused(name, f"a value with more than {MOST_DEPTH} levels, or inside itself") from None
    return encoded


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return {_KIND: "tensor", "name": _put(value.detach() if value.requires_grad else value, name, tensors)}
    if isinstance(value, np.ndarray):
        return {_KIND: "array", "name": _put(_from_array(value, name), name, tensors)}
    if type(value) is complex:
        return {_KIND: "complex", "items": [value.real, value.imag]}
    if isinstance(value, np.generic) and type(value.item()) in _NUMBERS:
        return {_KIND: "scalar", "dtype": value.dtype.name, "value": _encoded(value.item(), name, tensors)}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "name": f"{value}".removeprefix("torch.")}
    if type(value) is list:
        return [_encoded(item, f"{name}/{place}", tensors) for place, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {_KIND: "tuple", "items": [_encoded(v, f"{name}/{place}", tensors) for place, v in enumerate(value)]}
    if type(value) in (set, frozenset):
        return {_KIND: "set", "items": sorted((_without_tensors(item, name) for item in value), key=json.dumps)}
    if type(value) in (dict, OrderedDict, Counter):
        if type(value) is not Counter and all(type(key) is str for key in value) and _KIND not in value:
            return {key: _encoded(item, f"{name}/{key}", tensors) for key, item in value.items()}
        items = [[_without_tensors(k, name), _encoded(item, f"{name}/{k}", tensors)] for k, item in value.items()]
        return {_KIND: "counter" if type(value) is Counter else "dict", "items": items}
    raise _refused(name, f"a {type(value).__module__}.{type(value).__qualname__}")


def _put(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Puts a tensor under ``name``, or a name like it that is free, and returns the name."""
    if tensor.layout != torch.strided or f"{tensor.dtype}".removeprefix("torch.") not in DTYPES:
        raise _refused(name, f"a tensor of {tensor.dtype} with {tensor.layout}")
    free = name
    number = 1
    while free in tensors:  # {"a/b": x, "a": {"b": y}}, and {1: x, "1": y}
        number += 1
        free = f"{name}~{number}"
    tensors[free] = tensor
    return free


def _from_array(array: np.ndarray[Any, Any], name: str) -> Tensor:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    # ascontiguousarray() gives a number a dimension, and torch warns of an array that cannot be written.
    contiguous = np.ascontiguousarray(native).reshape(array.shape)
    try:
        return torch.from_numpy(contiguous if contiguous.flags.writeable else contiguous.copy())
    except TypeError as error:
        raise _refused(name, f"an array of {array.dtype}") from error


def _without_tensors(item: Any, name: str) -> Any:
    found: dict[str, Tensor] = {}
    encoded = _encoded(item, name, found)
    if found:
        raise _refused(name, "a set or a dictionary whose members or keys are tensors")
    return encoded


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"checkpoint: {name!r} is {what}, which a file without code cannot hold. Save its state_dict(), or numbers, "
        "texts, tensors, lists and dictionaries."
    )


def decode(found: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Returns the value that :func:`encode` encoded as ``found``; ``tensor`` returns a tensor by its name.

    A ``torch.Size`` comes back as a tuple, a frozen set as a set, and an ``OrderedDict`` as a dictionary. Raises
    CheckpointError for a kind that this package does not know, or a value that is not of its kind.
    """
    try:
        return _decoded(found, tensor)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: a value is damaged ({type(error).__name__}: {error}).") from error


def _decoded(found: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(found, list):
        return [_decoded(item, tensor) for item in found]
    if not isinstance(found, dict):
        return found
    if _KIND not in found:
        return {key: _decoded(item, tensor) for key, item in found.items()}
    kind = found[_KIND]
    if kind in _KINDS:
        return _KINDS[kind](found)
    if kind == "tensor":
        return tensor(found["name"])
    if kind == "array":
        return tensor(found["name"]).numpy()
    if kind in ("tuple", "set"):
        items = [_decoded(item, tensor) for item in found["items"]]
        return tuple(items) if kind == "tuple" else set(items)
    if kind in ("dict", "counter"):
        pairs = {_decoded(key, tensor): _decoded(item, tensor) for key, item in found["items"]}
        return Counter(pairs) if kind == "counter" else pairs
    raise CheckpointError(f"checkpoint: a value is of the kind {kind!r}, which this package does not know.")


def _scalar(found: dict[str, Any]) -> Any:
    dtype = np.dtype(found["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"{dtype} is no type of numbers")
    return dtype.type(_decoded(found["value"], _no_tensor))


def _dtype(found: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, found["name"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{found['name']} is no dtype")
    return dtype


def _no_tensor(name: str) -> Tensor:
    raise ValueError(f"{name!r} stands inside a number")


_KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bytes": lambda found: bytes.fromhex(found["hex"]),
    "complex": lambda found: complex(*found["items"]),
    "dtype": _dtype,
    "scalar": _scalar,
}
