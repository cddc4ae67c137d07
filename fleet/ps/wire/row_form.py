"""The forms in which rows travel: float32, bfloat16, or int8 with a scale for each row and error feedback.

[Note: Rows as int8]
A row of a push travels as ``q`` (int8) and one float32 ``scale = max|row| / 127``, ``q = round(row / scale)``; a row of
zeros has the scale 0. What the rounding has left, ``row - q * scale``, stays on the worker and is added to the next
gradient of the same key, so that the sum of the received rows differs from the sum of the gradients by one
remainder, whatever the number of steps. Dense gradients and all answers travel as bfloat16: an answer has no next time
that could make up for its error, and a scale for each dense number would take more bytes than float32.

Remainders are kept in a table of fixed size for each table of rows (:class:`Remainders`): a key has one place, and a
key that comes to a place takes it over; the remainder that was there is dropped. They are dropped too when the process
ends, and when this worker loads or clears the table. A dropped remainder is at most ``scale / 2`` in each number of one
gradient.

The journal holds messages as they came, so a recovered server decodes the same rows; a message that is sent again is
not encoded again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.ps.wire.messages import TablePart

WIRE_FORMS = ("float32", "bfloat16", "int8")
_MAX_BYTES = 64 << 20  # of the remainders of one table
_FIRST_PLACES = 1 << 12
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads neighbouring keys

Rows = NDArray[np.float32]


def check_wire(value: Any) -> str:
    """Returns ``value``; raises ConfigError unless it is one of the forms."""
    if value not in WIRE_FORMS:
        raise ConfigError(f"wire is {value!r}; it is one of {', '.join(map(repr, WIRE_FORMS))}.")
    return str(value)


def to_bfloat16(values: Rows) -> NDArray[np.uint16]:
    """Returns ``values`` rounded to bfloat16, each as the uint16 of its bits; not-a-number stays not-a-number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    halves = rounded.astype(np.uint16)
    unordered = np.isnan(values)
    if unordered.any():
        halves[unordered] = np.uint16(0x7FC0)
    return halves


def from_bfloat16(halves: NDArray[Any]) -> Rows:
    """Returns the float32 values of bfloat16 bits."""
    out = np.empty(halves.shape, np.float32)
    np.left_shift(halves, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    return out


def to_int8(rows: Rows) -> tuple[NDArray[np.int8], Rows]:
    """Returns ``rows`` [n, dim] as int8 and their scales [n]; a row that is not finite has a scale that is none."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scales = (largest / np.float32(127)).astype(np.float32)
    has_scale = (scales > 0) & np.isfinite(scales)
    divisors = np.where(has_scale, scales, np.float32(1))[:, None]
    shares = np.where(has_scale[:, None], rows, np.float32(0)) / divisors
    scales[~has_scale & ~np.isfinite(largest)] = np.nan  # the server sees that the gradient was no number
    return np.clip(np.rint(shares), -127, 127).astype(np.int8), scales


def from_int8(rows: NDArray[np.int8], scales: Rows) -> Rows:
    """Returns the float32 rows of int8 and their scales."""
    return rows.astype(np.float32) * scales[:, None]


class Remainders:
    """What rounding has left of the gradients of each key, for tables of rows; safe for several threads.

    Args:
        max_bytes: memory for each table, at most.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tables: dict[int, tuple[NDArray[np.int64], Rows]] = {}
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    def encode(self, part: TablePart) -> None:
        """Turns the float32 rows of a sparse part into int8 and scales, and keeps the remainders; ids are distinct."""
        if part.members is not None:
            own = part.each()
            for one in own:
                self.encode(one)
            part.rows = np.concatenate([one.rows for one in own if one.rows is not None])
            part.scales = np.concatenate([one.scales for one in own if one.scales is not None])
            return
        assert part.ids is not None
        assert part.rows is not None
        with self._lock:
            keys, left = self._table(part.table_id, part.dim, len(part.ids))
            places = _places(part.ids, len(keys))
            rows = part.rows + np.where((keys[places] == part.ids)[:, None], left[places], np.float32(0))
            part.rows, part.scales = to_int8(rows)
            rest = rows - from_int8(part.rows, part.scales)
            rest[~np.isfinite(part.scales)] = 0.0
            keys[places] = part.ids
            won = keys[places] == part.ids  # of two keys with one place, one
            left[places[won]] = rest[won]

    def forget(self, table_ids: Sequence[int]) -> None:
        """Drops the remainders of these tables."""
        with self._lock:
            for table_id in table_ids:
                self._tables.pop(table_id, None)

    def _table(self, table_id: int, dim: int, coming: int) -> tuple[NDArray[np.int64], Rows]:
        """Returns places and remainders with room for ``coming`` more keys, as far as the limit allows.

        It grows with the keys: to allocate the limit at once takes the first push 100 ms, in which an async worker
        goes on with parameters of its start.
        """
        most = 1 << max(1, (self._max_bytes // (8 + 4 * dim)).bit_length() - 1)
        if table_id not in self._tables:
            self._tables[table_id] = _empty(min(most, _FIRST_PLACES), dim)
            self._taken[table_id] = 0
        keys, left = self._tables[table_id]
        self._taken[table_id] += coming  # at most: keys that are here already count, too
        if self._taken[table_id] > len(keys) // 2 and len(keys) < most:
            here = np.flatnonzero(left.any(axis=1))
            self._taken[table_id] = len(here) + coming
            if self._taken[table_id] > len(keys) // 2:
                wider = _empty(min(most, 1 << (4 * self._taken[table_id]).bit_length()), dim)
                places = _places(keys[here], len(wider[0]))
                wider[0][places], wider[1][places] = keys[here], left[here]
                self._tables[table_id] = wider
        return self._tables[table_id]


def _empty(places: int, dim: int) -> tuple[NDArray[np.int64], Rows]:
    # Key 0 stands in every empty place with nothing left, which is right.
    return np.zeros(places, np.int64), np.zeros((places, dim), np.float32)


def _places(keys: NDArray[np.int64], count: int) -> NDArray[np.intp]:
    """Returns the places of ``keys`` among ``count``, a power of 2 above 1."""
    return ((keys.view(np.uint64) * _MIX) >> np.uint64(64 - (count.bit_length() - 1))).astype(np.intp)


def wire_parts(parts: Sequence[TablePart], form: str, remainders: Remainders | None = None) -> list[TablePart]:
    """Returns ``parts`` with their float32 rows in the form they travel in; ``remainders`` for int8."""
    for part in parts:
        if part.rows is None or form == "float32":
            continue
        if form == "int8" and part.ids is not None and remainders is not None:
            remainders.encode(part)
        else:
            part.rows = to_bfloat16(part.rows)
    return list(parts)


def wide_parts(parts: list[TablePart]) -> list[TablePart]:
    """Returns the decoded ``parts`` of a message with float32 rows."""
    for part in parts:
        if part.scales is not None:
            assert part.rows is not None
            part.rows, part.scales = from_int8(part.rows, part.scales), None
        elif part.rows is not None and part.rows.dtype == np.uint16:
            part.rows = from_bfloat16(part.rows)
    return parts
