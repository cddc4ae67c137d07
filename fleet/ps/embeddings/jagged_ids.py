"""JaggedIds: a number of ids for each sample, from the objects of torch and TorchRec that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class JaggedIds:
    """Ids of one feature, one behind the other.

    Args:
        values: the ids, [n].
        starts: returns where the ids of each sample begin.
    """

    values: Tensor
    starts: Callable[[], Tensor]


@runtime_checkable
class KeyedIds(Protocol):
    """The ids of several features one behind the other, as in TorchRec's ``KeyedJaggedTensor``.

    It may have a method ``stride_per_key``, the number of samples of each feature, where these differ.
    """

    def keys(self) -> Sequence[str]:
        """Returns the names of the features."""

    def values(self) -> Tensor:
        """Returns the ids, feature by feature and sample by sample, int64 [n]."""

    def lengths(self) -> Tensor:
        """Returns the number of ids of each feature and sample."""

    def offset_per_key(self) -> Sequence[int]:
        """Returns where each feature begins in the values, and where the last one ends."""


def is_keyed(value: Any) -> TypeGuard[KeyedIds]:
    """Returns whether ``value`` has the ids of several features."""
    # A protocol asks for attributes one by one; most values are tensors, and a step asks for each of them.
    return not isinstance(value, Tensor) and isinstance(value, KeyedIds)


def jagged_ids(value: Any) -> JaggedIds | None:
    """Returns the ids of a nested tensor of torch or a ``JaggedTensor`` of TorchRec; ``None`` of anything else.

    Example:
        >>> bags = [torch.tensor([1, 2]), torch.tensor([3])]
        >>> found = jagged_ids(torch.nested.nested_tensor(bags, layout=torch.jagged))
        >>> found.values.tolist(), found.starts().tolist()
        ([1, 2, 3], [0, 2])
    """
    if isinstance(value, Tensor) and not value.is_nested:
        return None
    if isinstance(value, Tensor) and not (value.layout is torch.jagged and _is_plain(value)):
        parts = [part.reshape(-1) for part in value.unbind()]
        values = torch.cat(parts) if parts else torch.empty(0, dtype=value.dtype)
        return JaggedIds(values, partial(_starts_of, torch.tensor([len(part) for part in parts], dtype=torch.int64)))
    if not (callable(getattr(value, "offsets", None)) and callable(getattr(value, "values", None))):
        return None
    return JaggedIds(value.values(), lambda: value.offsets()[:-1])


def has_weights(value: Any) -> bool:
    """Returns whether the ids of an object of TorchRec have weights; a combiner here counts every id once."""
    return getattr(value, "weights_or_none", lambda: None)() is not None


def features_of(keyed: KeyedIds) -> dict[str, JaggedIds]:
    """Returns the ids of each feature."""
    return {name: _ids_of(keyed, number) for number, name in enumerate(keyed.keys())}


def ids_of_feature(keyed: KeyedIds, name: str) -> JaggedIds | None:
    """Returns the ids of one feature; ``None`` where there is no feature of that name."""
    names = list(keyed.keys())
    return _ids_of(keyed, names.index(name)) if name in names else None


def _ids_of(keyed: KeyedIds, number: int) -> JaggedIds:
    start, stop = keyed.offset_per_key()[number : number + 2]
    return JaggedIds(keyed.values()[start:stop], partial(_starts_of_feature, keyed, number))


def _is_plain(jagged: Any) -> bool:
    """Returns whether a jagged tensor is [batch, j], and its values are its ids and nothing else."""
    return jagged.dim() == 2 and jagged._ragged_idx == 1 and jagged._lengths is None


def _starts_of_feature(keyed: Any, number: int) -> Tensor:
    lengths = keyed.lengths().detach().cpu().reshape(-1)
    if hasattr(keyed, "stride_per_key"):
        strides = list(keyed.stride_per_key())
    else:
        num_features = len(keyed.keys())
        strides = [len(lengths) // num_features] * num_features
    first = sum(strides[:number])
    return _starts_of(lengths[first : first + strides[number]].long())


def _starts_of(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths
