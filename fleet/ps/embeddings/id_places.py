"""Places of ids in a batch: whole tensors, columns of them, jagged tensors, and features of a KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.ps.embeddings.bags import WHOLE_TYPES
from fleet.ps.embeddings.jagged_ids import JaggedIds, features_of, ids_of_feature, is_keyed, jagged_ids

_DEPTH = 4  # of containers in a batch
_ID_TYPES = (*WHOLE_TYPES, torch.uint64, torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LARGEST = 8  # bytes of such a number

FoundIds: TypeAlias = Tensor | JaggedIds
# The tensors of one batch on the host, by the way to each: a copy from a device makes the process wait for it.
HostTensors: TypeAlias = dict[tuple[Any, ...], Tensor]


class _Whole(Enum):
    """Steps into what is ids as a whole."""

    JAGGED = 1  # a nested tensor, or a JaggedTensor
    PAIR = 2  # flat ids and offsets


@dataclass(frozen=True)
class _Attribute:
    name: str


@dataclass(frozen=True)
class _Feature:
    name: str


@dataclass(frozen=True)
class IdPlace:
    """Where ids are in a batch: ``width`` columns of a tensor from ``start`` on along ``dim``; 0: all of them."""

    path: tuple[Any, ...]  # keys, indices, names of attributes and features
    dim: int = 0
    start: int = 0
    width: int = 0

    def read(self, batch: Any, on_host: HostTensors) -> FoundIds | None:
        """Returns the ids of ``batch``, int64 or another type of integer; ``None`` where it has none there.

        The tensor that has them is added to ``on_host`` or taken from there.
        """
        for step in self.path:
            batch = _taken(batch, step)
            if batch is None:
                return None
        if isinstance(batch, JaggedIds):
            values = _tensor_of(batch.values)
            return None if values is None else JaggedIds(_as_whole(self._on_host(values, on_host)), batch.starts)
        tensor = _tensor_of(batch)
        if tensor is None:
            return None
        tensor = self._on_host(tensor, on_host)
        if self.width:
            if tensor.ndim <= self.dim or tensor.shape[self.dim] < self.start + self.width:
                return None
            tensor = tensor.narrow(self.dim, self.start, self.width)
        return _as_whole(tensor)

    def _on_host(self, tensor: Tensor, on_host: HostTensors) -> Tensor:
        if self.path not in on_host:
            on_host[self.path] = tensor.detach().cpu()
        return on_host[self.path]


def tensors_of(batch: Any) -> dict[tuple[Any, ...], Tensor]:
    """Returns the tensors of a batch that may hold ids, by the way to each."""
    leaves = _leaves(batch)
    return {path: found.values if isinstance(found, JaggedIds) else found for path, found in leaves}


def places_of(batch: Any, count: int) -> list[IdPlace]:
    """Returns where a batch has ``count`` ids or, where padding is left out of them, more.

    Example:
        >>> [place.path for place in places_of({"user": torch.tensor([1, 2]), "label": torch.tensor([1])}, 2)]
        [('user',)]
    """
    found = []
    for path, leaf in _leaves(batch):
        tensor = leaf.values if isinstance(leaf, JaggedIds) else leaf
        if tensor.numel() >= count:
            found.append(IdPlace(path))
        for dim in sorted({1, tensor.ndim - 1} - {0}) if tensor.ndim > 1 and tensor is leaf else ():
            size = tensor.shape[dim]
            each = tensor.numel() // max(size, 1)
            widths = {1, count // each if each and not count % each else 1}
            found += [
                IdPlace(path, dim, start, width)
                for width in sorted(widths)
                for start in range(size - width + 1)
                if each * width >= count
            ]
    return found


def _taken(value: Any, step: Any) -> Any:
    """Returns what ``step`` leads to from ``value``; ``None`` where it leads nowhere."""
    # A defaultdict would make what it lacks.
    if isinstance(value, Mapping) and step not in value:
        return None
    try:
        if isinstance(step, _Attribute):
            return getattr(value, step.name)
        if isinstance(step, _Feature):
            return ids_of_feature(value, step.name) if is_keyed(value) else None
        if isinstance(step, _Whole):
            return dict(_wholes(value)).get(step)
        return value[step]
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _leaves(batch: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], FoundIds]]:
    """Yields the ids that a batch may hold with the way to each."""
    if isinstance(batch, JaggedIds):
        if _tensor_of(batch.values) is not None:
            yield path, batch
        return
    tensor = _tensor_of(batch)
    if tensor is not None:
        yield path, tensor
    elif len(path) < _DEPTH:
        for step, value in _members(batch):
            yield from _leaves(value, (*path, step))


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return [*enumerate(value), *_wholes(value)]
    if is_keyed(value):
        return [(_Feature(name), found) for name, found in features_of(value).items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(_Attribute(field.name), getattr(value, field.name, None)) for field in fields(value)]
    return _wholes(value)


def _wholes(value: Any) -> list[tuple[_Whole, JaggedIds]]:
    """Returns the ids that ``value`` is as a whole, with the step into it."""
    if isinstance(value, tuple):
        is_pair = len(value) == 2 and all(isinstance(one, Tensor) and one.ndim == 1 for one in value)
        return [(_Whole.PAIR, JaggedIds(value[0], lambda: value[1]))] if is_pair else []
    found = jagged_ids(value)
    return [] if found is None else [(_Whole.JAGGED, found)]


def _tensor_of(value: Any) -> Tensor | None:
    """Returns ``value`` as a tensor if it may hold ids: integers, or floats, which some models cast."""
    if isinstance(value, np.ndarray):
        value = _shared_or_copied(value)
    if not isinstance(value, Tensor) or value.dtype not in _ID_TYPES or value.requires_grad or value.is_meta:
        return None
    return value if value.layout is torch.strided and not value.is_nested else None


def _shared_or_copied(array: NDArray[Any]) -> Tensor | None:
    """Returns the numbers of an array as a tensor: a copy where torch cannot share its memory."""
    kind = array.dtype
    if kind.kind not in "iuf" or kind.itemsize > _LARGEST:
        return None
    steps_whole = all(stride >= 0 and stride % kind.itemsize == 0 for stride in array.strides)
    if not (steps_whole and array.flags.writeable and kind.isnative):
        array = np.array(array, kind.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _as_whole(tensor: Tensor) -> Tensor:
    return tensor.long() if tensor.is_floating_point() else tensor
