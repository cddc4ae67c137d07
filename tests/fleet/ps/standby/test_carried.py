"""The messages between a server and its standby are ordinary messages of the protocol."""

from __future__ import annotations

from typing import Any, cast

from fleet.ps.standby.carried import Carried, send_piece
from fleet.ps.wire.messages import Buffer, Op, decode_header
from fleet.ps.wire.sealed import Sealed


class Line:
    """Keeps what is sent."""

    def send(self, header: bytes, buffers: list[Buffer], timeout_s: float) -> None:
        """Notes one message."""
        self.header, self.buffers = decode_header(header), buffers


def test_a_piece_says_what_it_carries() -> None:
    """Its kind is in ``step``, its record in ``seq``."""
    line: Any = Line()
    send_piece(cast(Sealed, line), Carried.RECORDS, [b"ab", b"c"], seq=7)
    assert (line.header.op, line.header.step, line.header.seq) == (Op.FOLLOW, Carried.RECORDS, 7)
    assert line.header.body_bytes == 3
    assert line.buffers == [b"ab", b"c"]
