"""Sealed: a connection whose ends have proven the job secret to each other; every message on it carries a seal.

On the wire a message is its header, the seal (32 bytes) and its body. The seal covers direction, number, header and
body under a key of this connection alone (:mod:`fleet._sealing`): nobody on the path can change, repeat, drop, reorder
or add a message. It hides nothing; TLS does.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleet._sealing import SEAL_BYTES, MessageSeals, prove, same
from fleet.ps.wire.body_digest import BodyDigest
from fleet.ps.wire.messages import HEADER_BYTES, Buffer, MessageError, is_in_memory
from fleet.ps.wire.shared_bodies import LEAST_BYTES, ROOM_BYTES, SharedBodies
from fleet.ps.wire.transport import Connection

_NOTHING = memoryview(b"")
SMALL_BODY_BYTES = 1024  # up to here HMAC alone is faster than HMAC over a digest of the body


class Sealed:
    """One end of a proven connection.

    Args:
        connection: the stream, right after both proofs.
        key: of this connection alone.
        is_server: whether this is the server's end.
    """

    def __init__(self, connection: Connection, key: bytes, *, is_server: bool) -> None:
        self.peer = connection.peer
        self.is_here = connection.is_here
        self._connection = connection
        self._memory: SharedBodies | None = None
        self._seals = MessageSeals(key, is_server=is_server)
        self._digest = BodyDigest(prove(key, b"body"))
        self._front = memoryview(bytearray(HEADER_BYTES + SEAL_BYTES))
        self._header = self._front[:HEADER_BYTES]
        self._seal = self._front[HEADER_BYTES:]

    def send(self, header: bytes, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Sends a message whose body ``buffers`` make up, or leaves the body in memory where the header says so."""
        if self._memory is not None and is_in_memory(header):
            self._memory.write(buffers)
            buffers = ()
        seal = self._seals.sent(header, *self._covered(buffers, sum(map(len, buffers))))
        self._connection.send([header, seal, *buffers], timeout_s)

    def receive_header(self, timeout_s: float | None = None, idle_s: float | None = None) -> memoryview:
        """Returns the header of the next message, valid until the one after it; the limits are the connection's.

        It is checked together with the body: until then use only the size of the body from it.
        """
        self._connection.receive(self._front, timeout_s, idle_s)
        return self._header

    def receive_body(self, body: memoryview, timeout_s: float | None = None) -> None:
        """Fills ``body`` and checks the seal of the message; raises :class:`MessageError` if it is wrong.

        A ``body`` that :meth:`body_in_memory` has returned is there already.
        """
        if is_in_memory(self._header):
            body = _NOTHING
        elif len(body):
            self._connection.receive(body, timeout_s, timeout_s)
        if not same(self._seal, self._seals.received(self._header, *self._covered([body], len(body)))):
            raise MessageError(f"{self.peer}: a message does not carry the seal of this connection.")

    def share(self, memory: SharedBodies) -> None:
        """Uses ``memory``, which the other end has, too, for large bodies from now on."""
        self._memory = memory

    @property
    def shares_memory(self) -> bool:
        """Whether large bodies go through memory."""
        return self._memory is not None

    def takes_in_memory(self, size: int) -> bool:
        """Returns whether a body of ``size`` bytes goes into shared memory, if the last one is no longer read there."""
        return self._memory is not None and LEAST_BYTES < size <= ROOM_BYTES

    def place_in_memory(self, size: int) -> memoryview | None:
        """Returns where the next body of this end would lie in memory; ``None`` if so many bytes go by the stream."""
        return self._memory.place(size) if self._memory is not None and self.takes_in_memory(size) else None

    def body_in_memory(self, size: int) -> memoryview | None:
        """Returns the body of ``size`` bytes of the message whose header came last; ``None`` if it comes as bytes.

        Raises:
            MessageError: the ends share no memory.
            NotShared: it has no room for so many bytes.
        """
        if not is_in_memory(self._header):
            return None
        if self._memory is None:
            raise MessageError(f"{self.peer}: a body in memory that the ends of this connection do not share.")
        return self._memory.read(size)

    def comes(self, limit_s: float) -> bool:
        """Waits at most ``limit_s`` seconds for the next message, or the end of the stream; returns whether it came."""
        return self._connection.comes(limit_s)

    def is_cut(self) -> bool:
        """Returns whether the stream has ended."""
        return self._connection.is_cut()

    def close(self) -> None:
        """Ends the stream."""
        self._connection.close()

    def _covered(self, buffers: Sequence[Buffer], size: int) -> Sequence[Buffer]:
        return buffers if size <= SMALL_BODY_BYTES else [self._digest(buffers, size)]
