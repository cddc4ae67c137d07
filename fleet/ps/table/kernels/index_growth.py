"""How the index of a sub-shard grows, for its kernels and for what foresees its size."""

from __future__ import annotations

from typing import Any

FIRST_CAPACITY = 32


def next_capacity(capacity: Any) -> Any:
    """Returns the capacity that follows: half as much again."""
    return capacity + capacity // 2


def is_full(num_entries: Any, capacity: Any) -> Any:
    """Returns whether one more entry takes the next capacity: the index would be filled beyond three quarters."""
    return 4 * (num_entries + 1) > 3 * capacity


def places_of(capacity: Any) -> Any:
    """Returns the places of an index: probing never wraps, so entries of the last ones run into extra ones."""
    return capacity + min(512, capacity // 8 + 16)
