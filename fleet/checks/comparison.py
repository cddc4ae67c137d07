"""Checksums of what must be equal on all workers, and text for where it differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fleet.strategies._shared.parts import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of the bits of each tensor, or of this worker's shard of it; exact on any device."""
    with torch.no_grad():
        sums = {name: _sum_of_bits(local(tensor.detach())) for name, tensor in named.items()}
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    return dict(zip(sums, torch.stack([found.to(device) for found in sums.values()]).tolist(), strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(-1).view(_BITS.get(tensor.element_size(), torch.int64))
    # torch converts a sum's input to int64 first; in slices this takes 8 MiB instead of twice the tensor.
    sums = [part.sum(dtype=torch.int64) for part in bits.split(1 << 20)]
    return torch.stack(sums).sum() if sums else bits.new_zeros((), dtype=torch.int64)


def digest(sums: Mapping[str, object]) -> str:
    """Returns a short text that differs where ``sums`` differ."""
    return hashlib.sha256(json.dumps(list(sums.items())).encode()).hexdigest()[:32]


def first_difference(rows: Iterable[Mapping[str, object]]) -> str:
    """Returns the first name under which ``rows`` hold different values, or an empty string."""
    rows = list(rows)
    names = {name: None for row in rows for name in row}
    return next((name for name in names if len({row.get(name) for row in rows}) > 1), "")


def listed_ranks(ranks: Iterable[int]) -> str:
    """Returns ``worker 1`` or ``workers 1, 2``.

    Example:
        >>> listed_ranks([1, 2])
        'workers 1, 2'
    """
    ranks = list(ranks)
    return f"worker{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"
