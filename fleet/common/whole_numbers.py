"""Counts that a user gives, in any type of integer."""

from __future__ import annotations

import operator
from typing import Any


def count_of(value: Any) -> int | None:
    """Returns an integer from 1 as an int, also one of numpy or a tensor of one; ``None`` for anything else.

    Booleans are no counts.

    Example:
        >>> count_of(np.int64(3)), count_of(0), count_of(2.0), count_of(True)
        (3, None, None, None)
    """
    if "bool" in str(getattr(value, "dtype", type(value).__name__)):
        return None
    try:
        count = operator.index(value)
    except TypeError:
        return None
    return count if count >= 1 else None
