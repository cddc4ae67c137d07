"""What all workers must have done alike, compared through the job's store: a worker that did not come is named."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.strategies._parts import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Comparison:
    """What this worker says about a subject, and what the others say.

    No collective is called: workers that do something else at this moment do not hang, and do not break what they do.

    Args:
        rank: rank of this worker.
        world_size: number of workers, which all create their comparisons in the same order.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        # A connection of its own: whoever waits on the job's blocks every other thread that uses it.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._rank, self._world_size = rank, world_size
        number = store.add(f"fleet/comparison/{rank}", 1)
        self._store = dist.PrefixStore(f"fleet/comparison/{number}", store)
        self._rounds: dict[str, int] = {}

    def gather(self, subject: str, said: Any, limit_s: float) -> list[Any]:
        """Returns what each worker says about ``subject``; ``None`` for one that says nothing within ``limit_s``.

        Workers say something about a subject equally often.
        """
        turn = self._rounds[subject] = self._rounds.get(subject, 0) + 1
        keys = [f"{subject}/{turn}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], json.dumps(said))
        deadline = time.monotonic() + limit_s
        while not self._have_come(keys) and time.monotonic() < deadline:
            pass
        found = [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        if self._rank:
            self._store.set(f"{keys[self._rank]}/read", "")
        else:  # it serves the store, and may end right after this
            readers = [f"{keys[rank]}/read" for rank in range(1, self._world_size) if found[rank] is not None]
            self._have_come(readers)
        return found

    def _have_come(self, keys: list[str]) -> bool:
        try:
            if keys:
                self._store.wait(keys, timedelta(seconds=1))  # a second, so that Ctrl-C is heard
        except dist.DistStoreError:
            return False
        return True


def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a number for the bits of each tensor, of this worker's part where it is divided; exact on any device."""
    with torch.no_grad():
        sums = {name: _sum_of_bits(local(tensor.detach())) for name, tensor in named.items()}
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    return dict(zip(sums, torch.stack([found.to(device) for found in sums.values()]).tolist(), strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(-1).view(_BITS.get(tensor.element_size(), torch.int64))
    return bits.sum(dtype=torch.int64)


def digest(sums: Mapping[str, object]) -> str:
    """Returns a short text that differs where ``sums`` differ."""
    return hashlib.sha256(json.dumps(list(sums.items())).encode()).hexdigest()[:32]


def first_difference(rows: Iterable[Mapping[str, object]]) -> str:
    """Returns the first name under which ``rows`` hold different values, or an empty text."""
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
