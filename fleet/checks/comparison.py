"""Checksums of values that must be equal on all workers, and text for the places where they differ."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from fleet.strategies._gradients.flat import chunks
from fleet.strategies._shared.parts import local

_Said = TypeVar("_Said")
_WORDS = 1 << 16  # of 8 bytes; a longer tensor is summed in slices of this length


@torch.no_grad()
def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a checksum of each tensor, or of this worker's shard of it: of its bits and their order.

    It is exact on any device, and takes a few operations for all small tensors together.
    """
    raw = {name: local(t.detach()).contiguous().view(-1).view(torch.uint8) for name, t in named.items()}
    sums = {name: _sum(_words([flat])) for name, flat in raw.items() if flat.numel() > 8 * _WORDS}
    # By device: a chunk joins its tensors, which must lie on one.
    small = sorted((name for name in raw if name not in sums), key=lambda name: str(raw[name].device))
    names = iter(small)
    for chunk in chunks([raw[name] for name in small], 8 * _WORDS):
        sums.update((name, found) for found, name in zip(_sums(chunk), names, strict=False))
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    # One transfer to the host for all sums, because each transfer waits for the device.
    found = torch.stack([sums[name].to(device) for name in named]).tolist()
    return dict(zip(named, found, strict=True))


def _sum(words: Tensor) -> Tensor:
    """Returns the sum of ``words`` times weights of their places; sums of slices are words of the next sum."""
    while True:
        slices = [(_mixed(part) * weights_on(part.device)[: part.numel()]).sum() for part in words.split(_WORDS)]
        if len(slices) == 1:
            return slices[0]
        words = torch.stack(slices)


def _sums(chunk: list[Tensor]) -> Tensor:
    """Returns the sum of each of ``chunk``, as :func:`_sum`; one cumulative sum serves them all."""
    lengths = [-(-flat.numel() // 8) for flat in chunk]
    words = _words(chunk)
    weights = weights_on(chunk[0].device)
    totals = (_mixed(words) * torch.cat([weights[:length] for length in lengths])).cumsum(0)
    ends = torch.cat([totals.new_zeros(1), totals])[torch.tensor([0, *accumulate(lengths)], device=totals.device)]
    return ends.diff()


def _words(chunk: list[Tensor]) -> Tensor:
    """Returns the bytes of ``chunk`` as words of 8 bytes; each tensor begins a word."""
    if len(chunk) == 1 and chunk[0].numel() % 8 == 0 and chunk[0].storage_offset() % 8 == 0:
        return chunk[0].view(torch.int64)
    padded = [part for flat in chunk for part in (flat, flat.new_zeros(-flat.numel() % 8)) if part.numel()]
    return torch.cat(padded or chunk).view(torch.int64)


def _mixed(words: Tensor) -> Tensor:
    # Numbers that differ in their upper bits alone would count for little: a product loses the bits above 64.
    return words ^ (words >> 32)


@functools.cache
def weights_on(device: torch.device) -> Tensor:
    """Returns the odd 64-bit numbers by which places count, the same on every worker."""
    # An odd number has an inverse modulo 2**64, so a change of one word always changes the sum.
    drawn = torch.randint(-(1 << 62), 1 << 62, (_WORDS,), generator=torch.Generator().manual_seed(1))
    return (drawn | 1).to(device)


def digest(sums: Mapping[str, object]) -> str:
    """Returns a short text that differs where ``sums`` differ."""
    # 128 bits keep the text short, and two states never get the same one by chance.
    return hashlib.sha256(json.dumps(list(sums.items())).encode()).hexdigest()[:32]


def first_difference(rows: Iterable[Mapping[str, object]]) -> str:
    """Returns the first name under which ``rows`` hold different values, or an empty string."""
    rows = list(rows)
    names = {name: None for row in rows for name in row}
    return next((name for name in names if len({row.get(name) for row in rows}) > 1), "")


def ranks_by(said: Mapping[int, _Said]) -> dict[_Said, list[int]]:
    """Returns the ranks that have ``said`` each value.

    Example:
        >>> ranks_by({0: "a", 1: "b", 2: "a"})
        {'a': [0, 2], 'b': [1]}
    """
    found: dict[_Said, list[int]] = {}
    for rank, value in said.items():
        found.setdefault(value, []).append(rank)
    return found


def listed_ranks(ranks: Iterable[int]) -> str:
    """Returns ``worker 1`` or ``workers 1, 2``.

    Example:
        >>> listed_ranks([1, 2])
        'workers 1, 2'
    """
    ranks = list(ranks)
    return f"worker{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"
