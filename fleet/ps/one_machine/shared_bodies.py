"""SharedBodies: memory in which the large bodies of one connection lie, where both ends are one user's on one machine.

A message with such a body still travels over the sealed connection, as header and seal: it says that the body is in
memory. The receiver reads it there, so nothing is sent, hashed or copied. The seal does not cover the body: a
process that can write to the memory can write to both processes, too.

[Note: Memory of a connection]
The worker makes the memory when it connects, after both proofs (:mod:`fleet.ps.one_machine.memory_file`), and HELLO
tells the server where it is. A server that cannot open it (another user, a container with processes of its own, a
system without memfd) says why, and all bodies travel on the socket. ``FLEET_PS_SHARED_MEMORY=0`` makes the worker offer
none: that is the only switch, and :class:`fleet.ps.wire.sealed.Sealed` the only user of this memory.

Each direction has one place, so the next body may be written once the other end has done with the last one. A worker's
request is done with when it is answered: the server copies gradients that it keeps for longer. Rows are done with when
the worker sends its next request that asks for rows, because a link takes outstanding rows before it sends anything
(:meth:`fleet.ps.client.link.Link.submit`). A worker without outstanding requests may write its next body there piece by
piece (:meth:`fleet.ps.client.client.Client.places`). Pages are taken by the first body that reaches them and kept until
the connection ends: a connection takes as much memory as its largest body in each direction.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleet.ps.one_machine.memory_file import NotShared, make_memory, open_memory

Buffer = bytes | bytearray | memoryview
LEAST_BYTES = 1 << 12  # up to here a body costs less on the socket
ROOM_BYTES = 1 << 26  # of each direction; larger bodies go by the socket
MOST_OPENED = 64  # of other processes at a time: each takes a descriptor, and up to twice ROOM_BYTES of memory


class SharedBodies:
    """One end's view of the memory; make it with :meth:`make` (the worker) or :meth:`open` (the server)."""

    _fd = -1

    def __init__(self, fd: int, *, is_server: bool) -> None:
        whole = memoryview(mmap.mmap(fd, 2 * ROOM_BYTES))
        self._own = whole[ROOM_BYTES:] if is_server else whole[:ROOM_BYTES]
        self._others = whole[:ROOM_BYTES] if is_server else whole[ROOM_BYTES:]
        self._own_at = _address(self._own)

    @classmethod
    def make(cls) -> tuple[SharedBodies, dict[str, Any]]:
        """Returns new memory and what the other process needs to open it, before :meth:`seal_off` is called.

        Raises:
            NotShared: this system has no such memory, or none is left.
        """
        fd, place = make_memory(2 * ROOM_BYTES)
        try:
            made = cls(fd, is_server=False)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise NotShared(f"no memory to share: {error}.") from None
        made._fd = fd
        return made, place

    @classmethod
    def open(cls, place: Mapping[str, Any]) -> SharedBodies:
        """Returns the memory that another process of this user and machine has made.

        Raises:
            NotShared: it is gone, or of another owner, kind or size.
        """
        if len(_opened) >= MOST_OPENED:
            raise NotShared(f"the server shares memory with {len(_opened)} workers already.")
        fd = open_memory(place, 2 * ROOM_BYTES)
        try:
            made = cls(fd, is_server=True)
            _opened.add(made)
            return made
        except (OSError, ValueError) as error:
            raise NotShared(f"the server cannot use the worker's memory: {error}.") from None
        finally:
            os.close(fd)

    def seal_off(self) -> None:
        """Makes the memory unreachable for processes that have not opened it."""
        fd = self._fd
        self._fd = -1  # first, or a signal could have it closed twice
        if fd >= 0:
            os.close(fd)

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Writes a body of at most :data:`ROOM_BYTES`; the other end must have done with the one before.

        What is at its place already, in the memory that :meth:`place` has returned, is not copied.
        """
        end = 0
        for buffer in buffers:
            begin, end = end, end + len(buffer)
            if len(buffer) < LEAST_BYTES or _address(buffer) != self._own_at + begin:
                self._own[begin:end] = buffer

    def place(self, size: int) -> memoryview:
        """Returns where the next body of this end lies: ``size`` bytes, at most :data:`ROOM_BYTES`."""
        return self._own[:size]

    def read(self, size: int) -> memoryview:
        """Returns the other end's last body, where it lies.

        Raises:
            NotShared: there is no room for so many bytes.
        """
        if size > ROOM_BYTES:
            raise NotShared(f"a body of {size} bytes in memory that has room for {ROOM_BYTES}.")
        return self._others[:size]

    def __del__(self) -> None:
        self.seal_off()


_opened: weakref.WeakSet[SharedBodies] = weakref.WeakSet()


def _address(buffer: Buffer) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
