"""Delta: the rows of a server's tables that changed between two records of its journal, and the forms to store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError, PSError
from fleet.ps.wire.row_form import from_bfloat16, to_bfloat16

ENCODINGS = ("float32", "bfloat16", "int8")
# numpy has no bfloat16: its bits travel as uint16.
STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "bfloat16": np.dtype("<u2"), "int8": np.dtype("i1")}
_LARGEST = np.float32(127)


class StaleDelta(PSError):
    """The sink holds another position than the one this delta continues; it has stored nothing."""


@dataclass(frozen=True, slots=True)
class RowsDelta:
    """The changed rows of one sparse table of one server.

    Attributes:
        table: the table's name.
        keys: distinct ids, int64 [n].
        values: their rows as a pull gives them, float32 [n, dim].
        deleted: ids whose rows are gone, int64 [m]; none of them is in ``keys``.
        routing: how ids are spread over the servers, see :func:`fleet.ps.servers_of_keys`.
    """

    table: str
    keys: NDArray[np.int64]
    values: NDArray[np.float32]
    deleted: NDArray[np.int64]
    routing: str = "range"


@dataclass(frozen=True, slots=True)
class Delta:
    """The rows of one server that changed between two records of its journal.

    Attributes:
        job: the job's name.
        server: which of the job's servers, from 0.
        num_servers: how many servers the job has.
        history: identity of the server's journal. A server that starts without its folder begins another one.
        previous: the watermark of the delta before; 0 begins a history.
        watermark: the journal record up to which the rows are complete; they hold no later one.
        step: sync mode: the last step that the rows hold; otherwise the lowest clock of the workers.
        pushed_at: when the oldest change inside came, unix time in seconds.
        whole: the delta replaces every row of this server: a history begins, a model was loaded, or more rows were
            waiting than a delta holds.
        tables: one entry for each table that has a change, or for each table when ``whole``.
    """

    job: str
    server: int
    num_servers: int
    history: str
    previous: int
    watermark: int
    step: int
    pushed_at: float
    whole: bool
    tables: tuple[RowsDelta, ...]


class Sink(Protocol):
    """Stores deltas. Its position and its rows change together or not at all."""

    def position(self, server: int) -> tuple[str, int] | None:
        """Returns (history, watermark) of the rows that the sink holds of ``server``, None when it holds nothing."""

    def write(self, delta: Delta) -> None:
        """Stores ``delta`` completely, and its watermark with it.

        Raises:
            StaleDelta: the delta is not whole, and the sink's position is not ``(delta.history, delta.previous)``.
        """

    def close(self) -> None:
        """Releases connections and files."""


def check_position(delta: Delta, held: tuple[str, int] | None) -> None:
    """Raises :class:`StaleDelta` unless a sink that holds position ``held`` may take ``delta``.

    Histories of a server are ordered: each begins with its number, so a later one compares above an earlier one. A
    whole delta may replace any earlier position, so a publisher that was overtaken can write nothing any more.

    Example:
        >>> delta = Delta("ads", 0, 1, "00000001-a", 7, 9, 3, 0.0, False, ())
        >>> check_position(delta, ("00000001-a", 7))
        >>> check_position(delta, ("00000001-a", 9))
        Traceback (most recent call last):
        fleet.ps.publishing.delta.StaleDelta: server 0 of job 'ads': the sink holds ('00000001-a', 9), not ...
    """
    if delta.whole and (held is None or held <= (delta.history, delta.watermark)):
        return
    if not delta.whole and held == (delta.history, delta.previous):
        return
    wanted = "an earlier position" if delta.whole else f"{(delta.history, delta.previous)}"
    raise StaleDelta(f"server {delta.server} of job {delta.job!r}: the sink holds {held}, not {wanted}.")


def check_encoding(name: object, encoding: object) -> str:
    """Returns ``encoding``; raises :class:`ConfigError` that names option ``name`` for an unknown one."""
    if not isinstance(encoding, str) or encoding not in ENCODINGS:
        raise ConfigError(f"{name} = {encoding!r}: rows are stored as one of {', '.join(map(repr, ENCODINGS))}.")
    return encoding


def encode(values: NDArray[np.float32], encoding: str) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Returns float32 rows [n, dim] in their stored form, and the scale of each row where the encoding has one.

    ``float32`` keeps the bits. ``bfloat16`` rounds to the nearest even value and returns uint16 [n, dim]. ``int8``
    returns int8 [n, dim] and float32 scales [n]: ``max |row| / 127``. A row of zeros has scale 0. A row with a value
    that is not finite has the scale not-a-number, and decodes to that.
    """
    values = np.ascontiguousarray(values, np.float32)
    if encoding == "float32":
        return values, None
    if encoding == "bfloat16":
        return to_bfloat16(values), None
    check_encoding("encoding", encoding)
    largest = np.abs(values).max(axis=1, initial=np.float32(0))
    scales = np.where(np.isfinite(largest), largest / _LARGEST, np.float32(np.nan)).astype(np.float32)
    # Rows of zeros and rows with values that are not finite divide by 1: their scale alone decides what they decode to.
    usable = scales > 0
    divisors = np.where(usable, scales, np.float32(1))
    rounded = np.rint(np.where(usable[:, None], values, np.float32(0)) / divisors[:, None])
    return np.clip(rounded, -_LARGEST, _LARGEST).astype(np.int8), scales


def decode(stored: NDArray[Any], scales: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Returns the float32 rows [n, dim] of rows that :func:`encode` stored; their dtype tells the encoding."""
    if stored.dtype == np.uint16:
        return from_bfloat16(np.ascontiguousarray(stored))
    if stored.dtype == np.int8:
        if scales is None:
            raise ConfigError("rows of int8 are decoded with the scale of each row; none were given.")
        return stored.astype(np.float32) * scales.astype(np.float32)[:, None]
    return np.ascontiguousarray(stored, np.float32)


def row_bytes(dim: int, encoding: str) -> int:
    """Returns how many bytes :func:`pack_rows` makes of one row."""
    return dim * STORED[encoding].itemsize + (4 if encoding == "int8" else 0)


def pack_rows(values: NDArray[np.float32], encoding: str) -> NDArray[np.uint8]:
    """Returns float32 rows as bytes, uint8 [n, :func:`row_bytes`], little-endian; int8 rows begin with their scale.

    Example:
        >>> rows = np.array([[1.0, -0.5], [0.0, 0.0]], np.float32)
        >>> pack_rows(rows, "int8").tolist()[1], row_bytes(2, "bfloat16")
        ([0, 0, 0, 0, 0, 0], 4)
    """
    stored, scales = encode(values, encoding)
    width = values.shape[1] * STORED[encoding].itemsize
    plain = np.ascontiguousarray(stored, STORED[encoding]).view(np.uint8).reshape(len(stored), width)
    if scales is None:
        return plain
    return np.concatenate([np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(-1, 4), plain], axis=1)


def unpack_rows(rows: bytes | Sequence[bytes], dim: int, encoding: str) -> NDArray[np.float32]:
    """Returns float32 [n, dim] from rows that :func:`pack_rows` made, one after the other or in a list."""
    joined = rows if isinstance(rows, bytes) else b"".join(rows)
    width = row_bytes(dim, check_encoding("encoding", encoding))
    if width and len(joined) % width:
        raise ConfigError(f"{len(joined)} bytes are no rows of dim {dim} as {encoding}, which take {width} bytes each.")
    plain = np.frombuffer(joined, np.uint8).reshape(-1, width)
    scales = None
    if encoding == "int8":
        scales = np.ascontiguousarray(plain[:, :4]).view("<f4").reshape(-1)
        plain = plain[:, 4:]
    stored = np.ascontiguousarray(plain).view(STORED[encoding]).reshape(len(plain), dim)
    return decode(stored, scales)
