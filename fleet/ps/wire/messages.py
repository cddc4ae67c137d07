"""The messages between workers and parameter servers: a fixed header, table parts, capped JSON. No pickle.

Every message is one 44-byte little-endian header and a body of at most ``max_body_bytes``. The body of a data
message (pull, push, add, set) is a sequence of parts, one per table; the body of a control message is JSON. All
functions here are pure: bytes in, values out, and each field is checked before it is used for anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet.errors import PSError

Buffer = bytes | bytearray | memoryview

MAGIC = b"FLPS"
VERSION = 3
MAX_BODY_BYTES = 1 << 28
DISAGREE = "disagree: "  # begins the key of a barrier whose workers do not ask for the same; the wishes follow
LOAD_WISH = "load "  # begins the wish of a worker at a barrier, if it is a load, in which all workers must agree
HOW_WISHED = ", mode "  # ends the place in the wish for a save: all who save to it must agree in the rest
MAX_CONTROL_BYTES = 1 << 20
MAX_TABLES = 1 << 10
MAX_TABLE_ID = 1 << 16
MAX_DIM = 1 << 16

_HEADER = struct.Struct("<4sBBHQQQHHII")
_PART = struct.Struct("<IIHHIQ")  # table id, n, fields present, members, dim, offset
HEADER_BYTES = _HEADER.size
_FLAGS_AT = 6  # the lower byte
PART_BYTES = _PART.size
MEMBER_BYTES = 8  # a table id and a number of rows, of a part with rows of several tables
MAX_MEMBERS = (1 << 16) - 1
assert HEADER_BYTES == 44
assert PART_BYTES == 24


class MessageError(PSError):
    """The bytes are not a valid message; nothing was changed."""


class Op(IntEnum):
    """What a message asks for."""

    HELLO = 1
    CREATE = 2
    PULL = 3
    PUSH = 4
    ADD = 5
    SET_DENSE = 6
    GEO_PULL = 7
    BARRIER = 8
    SAVE = 9
    LOAD = 10
    ALTER = 11
    STAT = 12
    PING = 13
    GOODBYE = 14
    STOP = 15
    SNAPSHOT = 16
    FOLLOW = 17  # of a standby to its server, see fleet.ps.standby.carried
    WATCH = 18  # as GEO_PULL, and of pushes too; step 1 in the answer: all rows must be read once
    MARK = 19  # names the rows of this moment at the sink


class MessageFlag:
    """Properties of a message: bits of a plain integer, because enumerations cost microseconds here."""

    NONE = 0
    BFLOAT16 = 1  # rows of this message (of the answer, for a pull) are bfloat16
    POSITIONS = 2  # a push carries positions of streams behind its parts
    RESPONSE = 4
    NO_CREATE = 8  # a pull does not create the rows it does not find
    NO_WAIT = 16  # a pull is answered at once, whatever the other workers have done
    NO_CLOCK = 32  # a push that more of the same step will follow
    # The answer to a push brings what its dense tables hold after the step, and rows that changed of watched tables.
    VALUES = 64
    IN_MEMORY = 128  # the body lies in memory that both ends share, see fleet.ps.one_machine.shared_bodies


class Status(IntEnum):
    """How a request went."""

    OK = 0
    DUPLICATE = 1  # applied before: acknowledged, not applied again
    WAITING = 2  # an interim answer: the server lives and waits for other workers
    REFUSED = 3  # the request was wrong; the body says why
    FENCED = 4  # another process has taken over this worker's rank
    FAILED = 5  # the server could not do it; the body says why


_IDS, _ROWS, _SHOWS, _CLICKS, _DENSE, _SLOTS, _SCALES = 1, 2, 4, 8, 16, 32, 64  # the fields of a part
_ALL_PRESENT, _ALL_FLAGS = 127, 255


class Header(NamedTuple):
    """The header of one message.

    In a request ``seq`` numbers the changes one channel makes, ``step`` is the training step and ``client_id`` the
    process. In an answer ``seq`` is the last durable number of the channel and ``step`` the step that the server has
    reached. ``tag`` is chosen by the client and returned with the answer.
    """

    op: Op
    flags: int = MessageFlag.NONE
    client_id: int = 0
    seq: int = 0
    step: int = 0
    n_tables: int = 0
    status: Status = Status.OK
    body_bytes: int = 0
    tag: int = 0


_ROW_FIELDS = ("ids", "rows", "shows", "clicks", "slots")


class Members(NamedTuple):
    """The tables whose rows a part holds one behind the other, and where the rows of each end."""

    tables: tuple[int, ...]
    ends: NDArray[np.int64]


@dataclass(slots=True)
class TablePart:
    """What a message carries for one table, or for several sparse ones of the same width (``members``).

    A sparse part has ``ids`` (int64 ``[n]``); a dense part has none and covers ``n`` elements from ``offset``.
    ``rows`` is float32 ``[n, dim]``, uint16 when it holds bfloat16 as it is on the wire, or int8 with ``scales``
    (float32 ``[n]``), whatever the message's flags are. ``shows`` and ``clicks`` are float32 ``[n]``, ``slots`` uint32
    ``[n]``.
    """

    table_id: int
    n: int
    dim: int
    ids: NDArray[np.int64] | None = None
    rows: NDArray[Any] | None = None
    shows: NDArray[np.float32] | None = None
    clicks: NDArray[np.float32] | None = None
    slots: NDArray[np.uint32] | None = None
    offset: int = 0
    scales: NDArray[np.float32] | None = None
    members: Members | None = None

    @property
    def table_ids(self) -> tuple[int, ...]:
        """The tables whose rows the part holds."""
        return (self.table_id,) if self.members is None else self.members.tables

    def each(self) -> list[TablePart]:
        """Returns a part of every table; their arrays are views."""
        if self.members is None:
            return [self]
        ends = self.members.ends.tolist()
        tables = zip(self.members.tables, [0, *ends], ends, strict=False)
        return [self.picked(table_id, slice(start, end)) for table_id, start, end in tables]

    def picked(self, table_id: int, places: slice | NDArray[np.intp]) -> TablePart:
        """Returns the rows of a sparse part at ``places`` as a part of one table."""
        arrays: dict[str, Any] = {
            name: None if (array := getattr(self, name)) is None else array[places] for name in (*_ROW_FIELDS, "scales")
        }
        return TablePart(table_id, len(arrays["ids"]), self.dim, **arrays)


def each_table(parts: Iterable[TablePart]) -> list[TablePart]:
    """Returns a part of every table of ``parts``; their arrays are views."""
    return [one for part in parts for one in part.each()]


def tables_of(parts: Iterable[TablePart]) -> list[int]:
    """Returns the tables of ``parts``."""
    return [table_id for part in parts for table_id in part.table_ids]


def rows_of(parts: Iterable[TablePart], tables: set[int]) -> list[TablePart]:
    """Returns the parts with their rows of ``tables`` alone."""
    found = []
    for part in parts:
        if tables.issuperset(part.table_ids):
            found.append(part)
        else:
            found += [one for one in part.each() if one.table_id in tables]
    return found


def join_parts(parts: Sequence[TablePart]) -> TablePart:
    """Returns sparse parts of the same width and fields as one part, in the order given."""
    if len(parts) == 1:
        return parts[0]
    arrays: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else np.concatenate([getattr(part, name) for part in parts])
        for name in _ROW_FIELDS
    }
    ends = np.cumsum([part.n for part in parts])
    members = Members(tuple(part.table_id for part in parts), ends)
    return TablePart(parts[0].table_id, int(ends[-1]), parts[0].dim, **arrays, members=members)


def encode_header(header: Header) -> bytes:
    """Returns the bytes of ``header``."""
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.op,
        header.flags,
        header.client_id,
        header.seq,
        header.step,
        header.n_tables,
        header.status,
        header.body_bytes,
        header.tag,
    )


def asks_rows(op: Op, flags: int) -> bool:
    """Returns whether the answer to a request brings rows or values, and so may be large."""
    return op in (Op.PULL, Op.GEO_PULL, Op.WATCH) or bool(flags & MessageFlag.VALUES)


def is_in_memory(header: Buffer) -> bool:
    """Returns whether the header in ``header`` says so of its body."""
    return bool(header[_FLAGS_AT] & MessageFlag.IN_MEMORY)


def decode_header(data: Buffer, max_body_bytes: int = MAX_BODY_BYTES) -> Header:
    """Returns the header in ``data``, or raises :class:`MessageError` for the first field that is not valid."""
    if len(data) != HEADER_BYTES:
        raise MessageError(f"a header has {HEADER_BYTES} bytes, received {len(data)}.")
    magic, version, op, flags, client_id, seq, step, n_tables, status, body, tag = _HEADER.unpack(data)
    if magic != MAGIC:
        raise MessageError(f"the message starts with {magic!r}, not {MAGIC!r}: the peer speaks another protocol.")
    if version != VERSION:
        raise MessageError(f"the peer speaks version {version} of the protocol, this side version {VERSION}.")
    if op not in _OPS:
        raise MessageError(f"operation {op} does not exist.")
    if flags & ~_ALL_FLAGS:
        raise MessageError(f"flags {flags:#x} hold bits that have no meaning.")
    if status not in _STATUSES:
        raise MessageError(f"status {status} does not exist.")
    if n_tables > MAX_TABLES:
        raise MessageError(f"{n_tables} tables in one message; at most {MAX_TABLES} are allowed.")
    if body > max_body_bytes:
        raise MessageError(f"a body of {body} bytes; at most {max_body_bytes} are allowed.")
    return Header(_OPS[op], flags, client_id, seq, step, n_tables, _STATUSES[status], body, tag)


_OPS = {int(op): op for op in Op}
_STATUSES = {int(status): status for status in Status}


def encode_parts(parts: Sequence[TablePart], bfloat16: bool = False) -> list[Buffer]:
    """Returns the buffers that make up the body for ``parts``; arrays are referred to, not copied.

    ``rows`` must be C-contiguous float32, or uint16 when ``bfloat16``; int8 in parts that have ``scales``.
    """
    if len(parts) > MAX_TABLES:
        raise MessageError(f"{len(parts)} tables in one message; at most {MAX_TABLES} are allowed.")
    buffers: list[Buffer] = []
    for part in parts:
        present = _DENSE if part.ids is None else _IDS
        if part.rows is not None:
            present |= _ROWS
        if part.shows is not None:
            present |= _SHOWS
        if part.clicks is not None:
            present |= _CLICKS
        if part.slots is not None:
            present |= _SLOTS
        if part.scales is not None:
            present |= _SCALES
        members = part.members
        count = 0 if members is None else len(members.tables)
        if count > MAX_MEMBERS:
            raise MessageError(f"a part of {count} tables; at most {MAX_MEMBERS} are allowed.")
        buffers.append(_PART.pack(part.table_id, part.n, present, count, part.dim, part.offset))
        if members is not None:
            sizes = np.diff(members.ends, prepend=0)
            buffers.append(np.stack((np.array(members.tables), sizes), axis=1).astype("<u4").tobytes())
        fields = (
            (part.ids, np.int64, part.n),
            (part.rows, _row_type(bfloat16, part.scales is not None), part.n * part.dim),
            (part.shows, np.float32, part.n),
            (part.clicks, np.float32, part.n),
            (part.slots, np.uint32, part.n),
            (part.scales, np.float32, part.n),
        )
        for values, dtype, size in fields:
            if values is not None:
                buffers.extend(_field(values, dtype, size, part.table_id))
    return buffers


def places_of_rows(counts: Sequence[int]) -> tuple[list[int], int]:
    """Returns where each part's float32 numbers begin in a body of parts with ``counts`` numbers and nothing else.

    The second value is the size of that body.
    """
    starts, end = [], 0
    for count in counts:
        starts.append(end + PART_BYTES)
        end += PART_BYTES + 4 * count + -4 * count % 8
    return starts, end


def _row_type(bfloat16: bool, has_scales: bool) -> Any:
    return np.int8 if has_scales else np.uint16 if bfloat16 else np.float32


def _field(values: NDArray[Any], dtype: type, size: int, table_id: int) -> list[Buffer]:
    if values.dtype != dtype or values.size != size or not values.flags.c_contiguous:
        raise MessageError(
            f"table {table_id}: an array of {values.dtype} {values.shape} instead of {size} contiguous "
            f"values of {np.dtype(dtype)}."
        )
    if not values.size:
        return []
    buffers: list[Buffer] = [memoryview(values).cast("B")]  # type: ignore[arg-type]
    if padding := -values.nbytes % 8:
        buffers.append(bytes(padding))
    return buffers


def decode_parts(body: Buffer, n_tables: int, bfloat16: bool = False) -> list[TablePart]:
    """Returns the ``n_tables`` parts in ``body``; their arrays are views of it.

    ``body`` must begin at an address that is a multiple of 8.

    Raises:
        MessageError: a length, an id or a dim is out of range, parts do not fill the body exactly, a table occurs
            twice.
    """
    parts: list[TablePart] = []
    position = 0
    seen: set[int] = set()
    for _ in range(n_tables):
        if len(body) - position < PART_BYTES:
            raise MessageError(f"the body ends inside the head of part {len(parts)}.")
        part, position = _decode_part(body, position, bfloat16)
        for table_id in part.table_ids:
            if table_id in seen:
                raise MessageError(f"table {table_id} occurs twice in one message.")
            seen.add(table_id)
        parts.append(part)
    if position != len(body):
        raise MessageError(f"the body has {len(body)} bytes, its {n_tables} parts fill {position}.")
    return parts


def _decode_part(body: Buffer, position: int, bfloat16: bool) -> tuple[TablePart, int]:
    table_id, n, present, count, dim, offset = _PART.unpack_from(body, position)
    position += PART_BYTES
    _check_part(table_id, present, dim, offset)
    members = None
    if count:
        if not present & _IDS or count * MEMBER_BYTES > len(body) - position:
            raise MessageError(f"table {table_id}: {count} members, which only a sparse part has, inside the body.")
        members = _decode_members(body, position, count, n)
        if members.tables[0] != table_id:
            raise MessageError(f"a part of table {table_id} begins with table {members.tables[0]}.")
        position += count * MEMBER_BYTES
    fields = (
        (_IDS, np.int64, n),
        (_ROWS, _row_type(bfloat16, bool(present & _SCALES)), n * dim),
        (_SHOWS, np.float32, n),
        (_CLICKS, np.float32, n),
        (_SLOTS, np.uint32, n),
        (_SCALES, np.float32, n),
    )
    arrays: list[Any] = []
    for bit, dtype, count in fields:
        if not present & bit:
            arrays.append(None)
            continue
        size = count * _ITEM_BYTES[dtype]
        if size > len(body) - position:
            raise MessageError(f"table {table_id}: {n} rows of dim {dim} do not fit into the rest of the body.")
        arrays.append(np.frombuffer(body, dtype, count, position))
        position += size + -size % 8
    ids, rows, shows, clicks, slots, scales = arrays
    if rows is not None:
        rows = rows.reshape(n, dim)
    return TablePart(table_id, n, dim, ids, rows, shows, clicks, slots, offset, scales, members), position


def _decode_members(body: Buffer, position: int, count: int, n: int) -> Members:
    pairs = np.frombuffer(body, np.uint32, 2 * count, position).reshape(count, 2).astype(np.int64)
    tables = pairs[:, 0]
    ends = np.cumsum(pairs[:, 1])
    if int(tables.max()) >= MAX_TABLE_ID or int(ends[-1]) != n:
        raise MessageError(f"a part of {n} rows: its {count} tables, up to {tables.max()}, have {ends[-1]} of them.")
    return Members(tuple(tables.tolist()), ends)


_ITEM_BYTES: dict[Any, int] = {np.int64: 8, np.int8: 1, np.uint16: 2, np.float32: 4, np.uint32: 4}


def _check_part(table_id: int, bits: int, dim: int, offset: int) -> None:
    if table_id >= MAX_TABLE_ID:
        raise MessageError(f"table id {table_id}; ids are below {MAX_TABLE_ID}.")
    if bits & ~_ALL_PRESENT:
        raise MessageError(f"table {table_id}: fields {bits:#x} hold bits that have no meaning.")
    if not 1 <= dim <= MAX_DIM:
        raise MessageError(f"table {table_id}: dim {dim}; it must be 1 to {MAX_DIM}.")
    dense = bool(bits & _DENSE)
    sparse = bool(bits & _IDS)
    if dense == sparse:
        raise MessageError(f"table {table_id}: a part is either sparse (it has ids) or dense.")
    if dense and (dim != 1 or bits & (_SHOWS | _CLICKS | _SLOTS)):
        raise MessageError(f"table {table_id}: a dense part has dim 1, no shows and no clicks; received dim {dim}.")
    if bits & _SCALES and (dense or not bits & _ROWS):
        raise MessageError(f"table {table_id}: scales belong to the int8 rows of a sparse part.")
    if sparse and offset:
        raise MessageError(f"table {table_id}: a sparse part has no offset; received {offset}.")


def control_body(fields: dict[str, Any]) -> bytes:
    """Returns the body of a control message; raises :class:`MessageError` when it is larger than allowed."""
    body = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_CONTROL_BYTES:
        raise MessageError(f"a control message of {len(body)} bytes; at most {MAX_CONTROL_BYTES} are allowed.")
    return body


def decode_control(body: Buffer) -> dict[str, Any]:
    """Returns the fields of a control message; an empty body has none."""
    if len(body) > MAX_CONTROL_BYTES:
        raise MessageError(f"a control message of {len(body)} bytes; at most {MAX_CONTROL_BYTES} are allowed.")
    if not len(body):
        return {}
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a control message that is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise MessageError(f"a control message must be a JSON object, received {type(fields).__name__}.")
    return fields
