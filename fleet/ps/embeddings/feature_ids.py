"""The ids of several features in one object: a mapping by name, or a KeyedJaggedTensor of TorchRec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from fleet.errors import ConfigError
from fleet.ps.embeddings.embedding import Ids
from fleet.ps.embeddings.jagged_ids import JaggedIds, KeyedIds, features_of, has_weights, is_keyed, jagged_ids

# Ids of one feature: as SparseEmbedding takes them, with offsets where they have some.
IdsAndOffsets: TypeAlias = tuple[Ids, Tensor | None]


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
    for given in ids.values():
        _check_weights(given, origin)
    return {name: _with_offsets(ids[name], does) for name, does in combines.items() if name in ids}


def _with_offsets(ids: Any, combines: bool) -> IdsAndOffsets:
    if isinstance(ids, tuple) and len(ids) == 2 and isinstance(ids[0], Tensor) and isinstance(ids[1], Tensor):
        return ids
    found = ids if isinstance(ids, JaggedIds) else jagged_ids(ids)
    if found is None:
        return ids, None
    return found.values, found.starts() if combines else None


def _of_keyed(ids: FeatureIds, origin: str) -> dict[str, JaggedIds]:
    if not is_keyed(ids):
        raise ConfigError(
            f"{origin} takes the ids of its features by name, as in {{'user': tensor}}, or a KeyedJaggedTensor; "
            f"received {type(ids).__name__}."
        )
    names = list(ids.keys())
    _check_weights(ids, origin)
    if len(set(names)) < len(names):
        raise ConfigError(f"{origin} received the features {names}; each name may occur once.")
    return features_of(ids)


def _check_weights(ids: Any, origin: str) -> None:
    if has_weights(ids):
        raise ConfigError(
            f"{origin} received a {type(ids).__name__} with weights, and a combiner here counts every id once. Look up "
            "the rows without a combiner and multiply them, or leave the weights out."
        )
