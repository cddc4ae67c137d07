"""Bags: the ids of a batch as a flat array, and the samples and slots that they belong to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet.errors import ConfigError
from fleet.ps.client.shards import Keys
from fleet.ps.embeddings.jagged_ids import check_unweighted, is_keyed, jagged_ids, lacking_of_keyed
from fleet.ps.embeddings.row_sums import picked, pooled

COMBINERS = ("none", "sum", "mean")

WHOLE_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# An odd factor keeps the ids of one slot apart modulo 2**64, and small ids apart across slots.
_SLOT_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_ALL_BITS = (1 << 64) - 1


@dataclass(slots=True)
class Bags:
    """Flat ids, int64 [n]; ``offsets``, where each bag begins, when bags are combined; the shape of the result."""

    ids: Keys
    offsets: Keys | None
    shape: tuple[int, ...]

    @property
    def lengths(self) -> Keys:
        """How many ids each bag has, int64."""
        if self.offsets is None:
            return np.ones(len(self.ids), np.int64)
        return np.diff(self.offsets, append=len(self.ids))

    def spread(self, values: Tensor, num_slots: int) -> NDArray[np.float32]:
        """Returns one number per id from one number per sample.

        Raises:
            ConfigError: the number of values is not the number of samples, or one is negative or not finite.
        """
        numbers = torch.as_tensor(values).detach().cpu().reshape(-1).to(torch.float32).numpy()
        lengths = self.lengths
        samples = len(lengths) // num_slots
        if len(numbers) != samples:
            raise ConfigError(f"show and click have {len(numbers)} numbers for {samples} samples; give one for each.")
        wrong = numbers[~((numbers >= 0) & (numbers < np.inf))]  # NaN too
        if len(wrong):
            raise ConfigError(f"show and click have {wrong[0]:g}; they take finite numbers of 0 or more.")
        counts: NDArray[np.float32] = np.repeat(np.repeat(numbers, num_slots), lengths)
        return counts

    def without(self, padding_idx: int | None) -> Keys | None:
        """Returns the places of the ids that are not ``padding_idx``, ``None`` where all are."""
        if padding_idx is None:
            return None
        padding = self.ids == padding_idx
        return np.flatnonzero(~padding) if padding.any() else None


class _Unfit(Exception):
    """Why ids cannot be taken apart."""


def flat_ids(ids: Tensor, origin: str = "SparseEmbedding") -> Keys:
    """Returns ``ids`` flat, int64 [n]; raises ConfigError unless they are integers."""
    try:
        return _flat(ids)
    except _Unfit as reason:
        raise ConfigError(f"{origin}: {reason}") from None


def bags_of(
    ids: Tensor | Sequence[Any],
    offsets: Tensor | None,
    combiner: str,
    num_slots: int,
    origin: str = "SparseEmbedding",
) -> Bags:
    """Returns ``ids`` flat.

    Args:
        ids: tensor of any shape, a list of one list or tensor per sample and slot, sample by sample; or with a combiner
            a jagged tensor.
        offsets: where each sample and slot begins in flat ids.
        combiner: "none", "sum" or "mean".
        num_slots: slots per sample.
        origin: who takes them, for messages.

    Raises:
        ConfigError: ids are not integers or have weights, or shape, offsets, combiner and slots do not fit.

    Example:
        >>> bags_of([[1, 2], [], [3]], None, "sum", 1).offsets.tolist()
        [0, 2, 2]
    """
    check_unweighted(ids, origin)
    try:
        return _taken_apart(*_of_jagged(ids, offsets, combiner), combiner, num_slots)
    except _Unfit as reason:
        raise ConfigError(f"{origin}: {reason}") from None


def _of_jagged(ids: Any, offsets: Tensor | None, combiner: str) -> tuple[Any, Tensor | None]:
    """Returns ids and offsets, of jagged ids the flat ones."""
    if is_keyed(ids):
        raise _Unfit(
            f"ids are a {type(ids).__name__} of the features {list(ids.keys())}, and this module has one table. Pass "
            "the ids of one feature, or use fleet.SparseEmbeddings."
        )
    found = jagged_ids(ids)
    if found is None:
        return ids, offsets
    if offsets is not None:
        raise _Unfit("offsets were given beside jagged ids, which have their own; omit them.")
    if combiner == "none":
        raise _Unfit(
            "ids are jagged, a number of ids for each sample, and combiner is 'none', so rows would have no sample. "
            "Give the module a combiner, 'sum' or 'mean', or pass ids that are padded to one length, [batch, length]."
        )
    return found.values, found.starts()


def _taken_apart(ids: Tensor | Sequence[Any], offsets: Tensor | None, combiner: str, num_slots: int) -> Bags:
    if offsets is not None and combiner == "none":
        raise _Unfit("offsets say which ids are combined, but combiner is 'none'.")
    if not isinstance(ids, Tensor):
        return _of_lists(ids, combiner, num_slots, offsets)
    flat = _flat(ids)
    if offsets is not None:
        if not isinstance(offsets, Tensor) or offsets.dtype not in WHOLE_TYPES:
            kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
            raise _Unfit(f"offsets are {kind}; they must be a tensor of integers.")
        starts = _flat(offsets)
        if ids.ndim != 1 or len(starts) % num_slots or _bad(starts, len(flat)):
            raise _Unfit(
                f"offsets {starts.tolist()[:8]} of ids {tuple(ids.shape)}; they must start with 0, "
                f"not decrease, not exceed the number of ids, and number a multiple of {num_slots} slots."
            )
        return _bags(flat, starts, num_slots)
    if combiner == "none":
        if num_slots > 1 and (ids.ndim < 2 or ids.shape[-1] != num_slots):
            raise _Unfit(f"ids are {tuple(ids.shape)}; the last dim holds the {num_slots} slots.")
        return Bags(flat, None, tuple(ids.shape))
    wanted = 2 if num_slots == 1 else 3
    if ids.ndim != wanted or (num_slots > 1 and ids.shape[1] != num_slots):
        form = "[batch, length]" if num_slots == 1 else f"[batch, {num_slots}, length]"
        raise _Unfit(
            f"ids are {tuple(ids.shape)}; with combiner {combiner!r} they must be {form}, or flat with offsets."
        )
    *bags, length = ids.shape
    return _bags(flat, np.arange(math.prod(bags), dtype=np.int64) * length, num_slots)


def keys_of_slots(bags: Bags, num_slots: int) -> Keys:
    """Returns a key per id that differs where ids or slots differ; 64-bit hashes may collide."""
    if bags.offsets is None:
        slots = np.arange(len(bags.ids), dtype=np.uint64) % np.uint64(num_slots)
    else:
        slots = np.repeat(np.arange(len(bags.offsets), dtype=np.uint64) % np.uint64(num_slots), bags.lengths)
    keys: Keys = (bags.ids.view(np.uint64) + slots * _SLOT_FACTOR).view(np.int64)
    return keys


def combined(bags: Bags, present: Keys | None, rows: Tensor, places: Tensor, combiner: str) -> Tensor:
    """Returns the rows of ids, or their sum or mean per bag, in the shape of ``bags``.

    Args:
        bags: the ids.
        present: places of the ids that have a row; the others count as zeros, or not at all in a bag. ``None``: all.
        rows: float32 [u, dim].
        places: int32, for each id that has a row, its place in ``rows``.
        combiner: as in :func:`bags_of`.
    """
    dim = rows.shape[1]
    if bags.offsets is None:
        found = picked(rows, places)
        if present is not None:
            spread = rows.new_zeros(len(bags.ids), dim)
            found = spread.index_copy(0, torch.from_numpy(present).to(rows.device), found)
        return found.view(*bags.shape, dim)
    starts = bags.offsets
    if present is not None:  # the rest of each bag begins after the rest of those before it
        starts = np.searchsorted(present, bags.offsets)
    if not len(rows):  # embedding_bag refuses a table without rows
        return rows.new_zeros(len(starts), dim).view(*bags.shape, dim)
    found = pooled(rows, places, torch.from_numpy(starts).to(rows.device), combiner)
    return found.view(*bags.shape, dim)


def joined(each: Sequence[Bags], present: Sequence[Keys | None]) -> tuple[Bags, Keys | None]:
    """Returns the bags of several lookups of one combiner, one behind the other, and the places of the present ids.

    Example:
        >>> bags, _ = joined([bags_of([[1, 2], []], None, "sum", 1), bags_of([[3]], None, "sum", 1)], [None, None])
        >>> bags.ids.tolist(), bags.offsets.tolist(), bags.shape
        ([1, 2, 3], [0, 2, 2], (3,))
    """
    sizes = [len(one.ids) for one in each]
    starts = np.cumsum([0, *sizes[:-1]])
    ids = np.concatenate([one.ids for one in each])
    own = [one.offsets for one in each if one.offsets is not None]
    if own:
        offsets = np.concatenate(own) + np.repeat(starts, [len(one) for one in own])
        bags = Bags(ids, offsets, (len(offsets),))
    else:
        bags = Bags(ids, None, (len(ids),))
    if all(places is None for places in present):
        return bags, None
    kept = [np.arange(size) if places is None else places for places, size in zip(present, sizes, strict=True)]
    return bags, np.concatenate(kept) + np.repeat(starts, [len(places) for places in kept])


def _of_lists(ids: Sequence[Any], combiner: str, num_slots: int, offsets: Tensor | None) -> Bags:
    if offsets is not None or not isinstance(ids, list | tuple):
        raise _Unfit(
            f"ids are a tensor, or a list of ids per sample; received {type(ids).__name__}.{lacking_of_keyed(ids)}"
        )
    parts = [_flat(part if isinstance(part, Tensor) else _as_tensor(part)) for part in ids]
    if len(parts) % num_slots:
        raise _Unfit(f"{len(parts)} lists of ids; give one for each of {num_slots} slots of each sample.")
    flat = np.concatenate(parts) if parts else np.empty(0, np.int64)
    starts = np.cumsum([0, *(len(part) for part in parts)])[: len(parts)].astype(np.int64)
    bags = _bags(flat, starts, num_slots)
    if combiner == "none":
        if num_slots > 1:
            raise _Unfit("lists of ids in several slots need a combiner, 'sum' or 'mean'.")
        return Bags(flat, None, (len(flat),))
    return bags


def _bags(flat: Keys, starts: Keys, num_slots: int) -> Bags:
    shape = (len(starts),) if num_slots == 1 else (len(starts) // num_slots, num_slots)
    return Bags(flat, starts, shape)


def _as_tensor(part: Any) -> Tensor:
    try:
        return torch.as_tensor(part, dtype=None if len(part) else torch.int64)
    except (TypeError, ValueError, RuntimeError):
        is_listed = isinstance(part, list | tuple)
        if is_listed and all(
            type(one) is int and -(1 << 63) <= one <= _ALL_BITS for one in part
        ):  # hashes may be unsigned
            return torch.from_numpy(np.array([one & _ALL_BITS for one in part], np.uint64).view(np.int64))
        raise _Unfit(f"{part!r} is not a list of ids.") from None


def _flat(ids: Tensor) -> Keys:
    if ids.layout is not torch.strided or ids.is_nested:
        raise _Unfit(f"ids are of layout {ids.layout}; they must be strided, as ids.to_dense() returns them.")
    if ids.is_meta:
        raise _Unfit("ids are on the device meta and have no values; pass ids on the CPU or a GPU.")
    if ids.dtype not in WHOLE_TYPES and ids.dtype is not torch.uint64:
        raise _Unfit(f"ids are {ids.dtype}; they must be integers (torch.int64).")
    whole = ids
    if ids.dtype is not torch.int64 or not ids.is_cpu:
        same_bits = ids.detach().view(torch.int64) if ids.dtype is torch.uint64 else ids.detach()
        whole = same_bits.to("cpu", torch.int64)
    try:
        numbers = whole.numpy()
    except RuntimeError as error:
        raise _Unfit(
            f"the ids are a {type(ids).__name__} whose numbers cannot be read, as inside torch.func.vmap and "
            f"torch.export: {error} Call the module outside, and export with fleet.save_inference_model."
        ) from None
    flat: Keys = np.ascontiguousarray(numbers).reshape(-1)
    return flat


def _bad(starts: Keys, n: int) -> bool:
    return bool(len(starts) and (starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > n)) or bool(
        n and not len(starts)
    )
