"""The ids of several features in one object: a mapping by name, or a KeyedJaggedTensor of TorchRec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.ps.embeddings.embedding import Ids

# Ids of one feature: as SparseEmbedding takes them, with offsets where they have some.
IdsAndOffsets: TypeAlias = tuple[Ids, Tensor | None]


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

    def offsets_per_key(self) -> Sequence[int]:
        """Returns where each feature begins in the values, and where the last one ends."""


FeatureIds: TypeAlias = "Mapping[str, Any] | KeyedIds"


def by_name(ids: FeatureIds, combines: Mapping[str, bool], origin: str) -> dict[str, IdsAndOffsets]:
    """Returns the ids of each feature, in the order of ``combines``.

    Args:
        ids: by name a tensor, a list, a pair of flat ids and offsets, or a jagged tensor; or a KeyedJaggedTensor.
        combines: by feature, whether its rows are combined; otherwise jagged ids are flat ids without offsets.
        origin: who takes them, for messages.

    Raises:
        ConfigError: ``ids`` are something else, or of a feature that is not known.
    """
    if not isinstance(ids, Mapping):
        ids = _of_keyed(ids, origin)
    unknown = ids.keys() - combines.keys()
    if unknown:
        raise ConfigError(
            f"{origin} received ids of {sorted(map(str, unknown))}, for which it has no table; it has tables for "
            f"{list(combines)}. Pass the ids of these alone, or add a table where the collection is made."
        )
    return {name: _with_offsets(ids[name], does) for name, does in combines.items() if name in ids}


@dataclass(frozen=True)
class _Bags:
    """Ids of one feature, one behind the other, and where those of each sample begin."""

    values: Tensor
    starts: Tensor


def _with_offsets(ids: Any, combines: bool) -> IdsAndOffsets:
    if isinstance(ids, Tensor) and not ids.is_nested:
        return ids, None
    if isinstance(ids, tuple) and len(ids) == 2 and isinstance(ids[0], Tensor) and isinstance(ids[1], Tensor):
        return ids
    if isinstance(ids, Tensor) and not (ids.layout is torch.jagged and _is_plain(ids)):
        return list(ids.unbind()), None
    if hasattr(ids, "offsets") and hasattr(ids, "values"):  # a jagged tensor, or a JaggedTensor of TorchRec
        ids = _Bags(ids.values(), ids.offsets()[:-1])
    if isinstance(ids, _Bags):
        return ids.values, ids.starts if combines else None
    return ids, None


def _is_plain(jagged: Any) -> bool:
    """Returns whether a jagged tensor is [batch, j], and its values are its ids and nothing else."""
    return jagged.dim() == 2 and jagged._ragged_idx == 1 and jagged._lengths is None


def _of_keyed(ids: FeatureIds, origin: str) -> dict[str, _Bags]:
    if not isinstance(ids, KeyedIds):
        raise ConfigError(
            f"{origin} takes the ids of its features by name, as in {{'user': tensor}}, or a KeyedJaggedTensor; "
            f"received {type(ids).__name__}."
        )
    names = list(ids.keys())
    weights = getattr(ids, "weights_or_none", lambda: None)()
    if weights is not None:
        raise ConfigError(
            f"{origin} received a {type(ids).__name__} with weights, and a combiner here counts every id once. Look up "
            "the rows without a combiner and multiply them, or leave the weights out."
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{origin} received the features {names}; each name may occur once.")
    values = ids.values()
    lengths = ids.lengths().detach().cpu().reshape(-1)
    starts = list(ids.offsets_per_key())
    strides = list(getattr(ids, "stride_per_key", lambda: [len(lengths) // max(len(names), 1)] * len(names))())
    found: dict[str, _Bags] = {}
    first = 0
    for name, start, stop, stride in zip(names, starts[:-1], starts[1:], strides, strict=True):
        own = lengths[first : first + stride].long()
        found[name] = _Bags(values[start:stop], own.cumsum(0) - own)
        first += stride
    return found
