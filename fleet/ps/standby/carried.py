"""The stream between a server and its standby: FOLLOW messages on an ordinary connection of the job.

The standby asks once, with JSON. The server answers with messages whose ``step`` is their kind (:class:`Carried`). The
standby confirms each batch of records with a message without a body, whose ``seq`` is its last record.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from fleet.ps.wire.messages import Buffer, Header, Op, Status, control_body, encode_header
from fleet.ps.wire.sealed import Sealed

BEAT_S = 0.5
LINE_S = 3.0  # a line without a message for this long is broken


class Carried(IntEnum):
    """The kind of a message of the stream."""

    STANDING = 1  # JSON: epoch, leads, joined, fresh
    FILE = 2  # a piece of a file of the snapshot: the length of its name (2 bytes), its name, the piece
    SNAPSHOT = 3  # the files are complete; seq: the snapshot's record
    RECORDS = 4  # records as they are in the journal
    BEAT = 5  # the server lives
    JOINED = 6  # from here on, promises to workers need this standby
    END = 7  # the job is over
    REFUSED = 8  # JSON: error
    TAKE_OVER = 9  # every record is sent, and there will be no other: serve from now on


def send_piece(
    line: Sealed, kind: Carried, buffers: Sequence[Buffer] = (), *, seq: int = 0, timeout_s: float = LINE_S
) -> None:
    """Sends one message of the stream."""
    size = sum(map(len, buffers))
    line.send(encode_header(Header(Op.FOLLOW, 0, 0, seq, kind, 0, Status.OK, size)), list(buffers), timeout_s)


def send_fields(line: Sealed, fields: dict[str, Any], kind: Carried = Carried.STANDING) -> None:
    """Sends ``fields`` as JSON."""
    send_piece(line, kind, [control_body(fields)])


def send_refusal(line: Sealed, reason: object) -> None:
    """Tells the other end why it is refused."""
    send_fields(line, {"error": str(reason)}, Carried.REFUSED)
