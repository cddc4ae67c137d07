"""The position of a server in Redis, which its publisher writes beside the rows; checked when it is read."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_SERVERS = 1 << 16
_MOST_BYTES = 1 << 16
_LARGEST = 1 << 63  # of a record, and of a step


def read_position(text: bytes) -> dict[str, Any]:
    """Returns history, watermark, step, pushed_at, num_servers and values; absent fields have their defaults.

    Raises:
        ValueError: no publisher has written this.

    Example:
        >>> read_position(b'{"history": "00000001-a", "watermark": 7}')["step"]
        0
    """
    try:
        # Anybody who may write to Redis may write here: sizes and types are checked before any use.
        found = json.loads(text[:_MOST_BYTES])
        fields = {"step": 0, "pushed_at": 0.0, "num_servers": 1, "values": "", **found}
        whole = [fields["watermark"], fields["step"], fields["num_servers"]]
        pushed_at = fields["pushed_at"] + 0.0
    except (KeyError, TypeError, OverflowError, RecursionError):
        raise ValueError("not a position") from None
    numbers = all(type(number) is int and 0 <= number < _LARGEST for number in whole) and math.isfinite(pushed_at)
    names = isinstance(fields["history"], str) and isinstance(fields["values"], str)
    if not (numbers and names and 1 <= fields["num_servers"] <= MAX_SERVERS):
        raise ValueError("not a position")
    return fields
