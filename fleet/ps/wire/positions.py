"""Positions of streams behind the parts of a push: they change together with the rows, in one journal record.

The body of a push with the flag ``POSITIONS`` ends with JSON, padded to a multiple of 8 bytes, and the length of the
JSON: a reader cuts it off before it reads the parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

from fleet.ps.wire.messages import MAX_CONTROL_BYTES, Buffer, MessageError

# By source and partition: the offset at which this worker began to read, and the one after the last event that the
# push and those before it hold.
Positions: TypeAlias = dict[str, dict[str, tuple[int, int]]]

_LENGTH = struct.Struct("<Q")
_MAX_OFFSET = 1 << 62


def positions_tail(positions: Mapping[str, Mapping[str, tuple[int, int]]]) -> bytes:
    """Returns the bytes behind the parts of a push with ``positions``; :func:`split_positions` reads it.

    Raises:
        MessageError: they take more than a message may hold.
    """
    text = json.dumps(positions, separators=(",", ":")).encode()
    if len(text) > MAX_CONTROL_BYTES:
        raise MessageError(f"positions of streams take {len(text)} bytes; at most {MAX_CONTROL_BYTES} are allowed.")
    return text + bytes(-len(text) % 8) + _LENGTH.pack(len(text))


def split_positions(body: Buffer) -> tuple[memoryview, Positions]:
    """Returns the parts and the positions of a push.

    Raises:
        MessageError: the end of the body is not what :func:`positions_tail` makes.
    """
    view = memoryview(body)
    size = _LENGTH.unpack(view[-_LENGTH.size :])[0] if len(view) >= _LENGTH.size else len(view)
    start = len(view) - _LENGTH.size - size - -size % 8
    if size > MAX_CONTROL_BYTES or start < 0:
        raise MessageError("a push with positions of streams ends without them.")
    try:
        fields = json.loads(bytes(view[start : start + size]))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"positions of streams that are not JSON: {error}.") from None
    return view[:start], _checked(fields)


def _checked(fields: Any) -> Positions:
    if not isinstance(fields, dict) or not all(isinstance(partitions, dict) for partitions in fields.values()):
        raise MessageError("positions of streams are {source: {partition: [first, next]}}.")
    return {
        source: {partition: _range(source, partition, ends) for partition, ends in partitions.items()}
        for source, partitions in fields.items()
    }


def _range(source: str, partition: str, ends: Any) -> tuple[int, int]:
    if isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends):
        first, following = ends
        if 0 <= first <= following <= _MAX_OFFSET:
            return first, following
    raise MessageError(
        f"partition {partition!r} of {source!r}: a range is [first, next] with 0 <= first <= next, received {ends!r}."
    )
