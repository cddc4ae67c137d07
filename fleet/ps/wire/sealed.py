"""Sealed: a connection whose ends have proven the job secret to each other; every message on it carries a seal.

On the wire a message is its header, the seal (32 bytes) and its body. The seal covers direction, number, header and
body under a key of this connection alone (:mod:`fleet.common.sealing`): nobody on the path can change, repeat, drop,
reorder or add a message. It hides nothing; TLS does.

[Note: Digest of a large body]
HMAC-SHA256 over rows would take longer than pulling and pushing them. So a body is first hashed as in UMAC (RFC 4418):
by NH, a universal hash under a secret key that is used for nothing else; HMAC covers the result. For each block of
4 KB, NH is the sum, modulo 2^64, of ``(low + key_low) * (high + key_high)`` over its lanes of 8 bytes, with the sums in
brackets modulo 2^32, and once more with the key one lane on. Two bodies of equal length have the same digest for at
most one in 2^64 of the keys. A connection ends with the first wrong seal, so there is one attempt per key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.common.sealing import SEAL_BYTES, MessageSeals, prove, same
from fleet.ps.one_machine.memory_file import NotShared
from fleet.ps.one_machine.shared_bodies import LEAST_BYTES, ROOM_BYTES, SharedBodies
from fleet.ps.table.kernels.numba_cache import address_of, load_kernels
from fleet.ps.wire.messages import HEADER_BYTES, Buffer, MessageError, is_in_memory, places_of_rows
from fleet.ps.wire.transport import Connection

_LEAST_BUFFER = 1 << 16
_NOTHING = memoryview(b"")
SMALL_BODY_BYTES = 1024  # up to here HMAC alone is faster than HMAC over a digest of the body
JOINED_BYTES = 1 << 16  # up to here joining the buffers is cheaper than taking the address of each


class BodyDigest:
    """The digests of one connection's bodies, under a key derived from ``secret``; one thread at a time."""

    def __init__(self, secret: bytes) -> None:
        kernel = load_kernels("seal")
        self._add_lanes = kernel.add_lanes
        self._block_bytes = 8 * kernel.LANES
        self._key = np.frombuffer(hashlib.shake_256(secret).digest(self._block_bytes + 8), np.uint64)
        self._joined = np.empty(JOINED_BYTES, np.uint8)
        self._view = memoryview(self._joined)  # type: ignore[arg-type]
        self._key_at = address_of(self._key)
        self._joined_at = address_of(self._joined)
        self._make_room(JOINED_BYTES)

    def __call__(self, buffers: Sequence[Buffer], size: int) -> memoryview:
        """Returns the digest of the body of ``size`` bytes that ``buffers`` make up, valid until the next one."""
        blocks = -(-size // self._block_bytes)
        if 2 * blocks > len(self._sums):
            self._make_room(size + size // 4)
        if size <= JOINED_BYTES:
            self._add_joined(buffers)
        else:
            self._add_each(buffers)
        return self._digest[: 16 * blocks]

    def _make_room(self, size: int) -> None:
        self._sums = np.empty(2 * (-(-size // self._block_bytes)), np.uint64)
        self._sums_at = address_of(self._sums)
        self._digest = memoryview(self._sums).cast("B")  # type: ignore[arg-type]

    def _add_joined(self, buffers: Sequence[Buffer]) -> None:
        end = 0
        for buffer in buffers:
            begin = end
            end = end + len(buffer)
            self._view[begin:end] = buffer
        # The digest reads whole lanes; bytes of an earlier body must not get into the last one.
        if end % 8:
            self._joined[end : end + 8 - end % 8] = 0
        self._add_lanes(self._joined_at, -(-end // 8), 0, self._key_at, self._sums_at)

    def _add_each(self, buffers: Sequence[Buffer]) -> None:
        first = 0
        rest = b""
        for buffer in buffers:
            if rest:  # an odd end of rows, and the padding after it
                buffer = rest + bytes(buffer)
            count = len(buffer) // 8
            self._add(buffer, count, first)
            first = first + count
            rest = bytes(buffer[8 * count :])
        if rest:
            self._add(rest.ljust(8, b"\0"), 1, first)

    def _add(self, buffer: Buffer, count: int, first: int) -> None:
        if count:
            data = np.frombuffer(buffer, np.uint8)
            self._add_lanes(address_of(data), count, first, self._key_at, self._sums_at)


def _buffer(size: int) -> memoryview:
    # Bodies of a connection grow and shrink by a few rows: one buffer serves them, and its unused pages cost nothing.
    return memoryview(np.empty(max(size + size // 4, _LEAST_BUFFER), np.uint8))  # type: ignore[arg-type]


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
        self._offered: SharedBodies | None = None
        self._body = memoryview(b"")  # of messages that came by the stream
        self._rows = memoryview(b"")  # for answers that leave by the stream
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

    def body(self, size: int) -> memoryview:
        """Returns the place of the body whose header came last, ``size`` bytes; invalidates the view before it."""
        shared = self.body_in_memory(size)
        if shared is not None:
            return shared
        if size > len(self._body):
            self._body = _buffer(size)
        return self._body[:size]

    def kept_body(self, body: memoryview, *, stays: bool) -> memoryview:
        """Returns the last body so that it stays valid after the next one has come.

        ``stays`` says that the other end leaves it as it is in shared memory, so that no copy is needed.
        """
        if not is_in_memory(self._header):
            self._body = memoryview(b"")  # the next body gets another buffer
            return body
        return body if stays else memoryview(np.frombuffer(body, np.uint8).copy())  # type: ignore[arg-type]

    def rows(self, shapes: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]]:
        """Returns an array for each part of the next body of this end; invalidates the arrays before them.

        In shared memory they lie where the body has them, so that nothing is copied.
        """
        starts, whole = places_of_rows([n * dim for n, dim in shapes])
        place = self.place_in_memory(whole)
        if place is None:
            if whole > len(self._rows):
                self._rows = _buffer(whole)
            place = self._rows
        return [
            np.frombuffer(place, np.float32, n * dim, start).reshape(n, dim)
            for (n, dim), start in zip(shapes, starts, strict=True)
        ]

    def offer_memory(self) -> dict[str, Any]:
        """Makes memory to share and returns the place under which the server opens it; :meth:`end_offer` comes next.

        Raises:
            NotShared: this system has no such memory, or none is left.
        """
        self._offered, place = SharedBodies.make()
        return place

    def end_offer(self, *, accepted: bool) -> None:
        """Uses the memory that was offered for large bodies from now on, if the server has opened it."""
        assert self._offered is not None
        self._offered.seal_off()
        self._memory = self._offered if accepted else None
        self._offered = None

    @property
    def offers_memory(self) -> bool:
        """Whether memory was offered, and :meth:`end_offer` was not called yet."""
        return self._offered is not None

    def accept_memory(self, place: Any) -> bool | str:
        """Uses the memory that a worker offers; returns True, or the reason why not."""
        try:
            if not self.is_here:
                raise NotShared("the server does not see that the worker is on its machine.")
            self._memory = SharedBodies.open(place if isinstance(place, dict) else {})
        except NotShared as error:
            return str(error)
        return True

    @property
    def shares_memory(self) -> bool:
        """Whether large bodies go through memory."""
        return self._memory is not None

    def takes_in_memory(self, size: int) -> bool:
        """Returns whether a body of ``size`` bytes goes into shared memory, once the last one there has been read."""
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
