"""The transport seam over memory, for tests: the same promises as sockets, and faults on demand.

Example:
    >>> network = LocalTransport()
    >>> network.faults.append(Fault("server", 3, "cut"))  # the server's third message is lost with its connection
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fleet.ps.wire.messages import Buffer
from fleet.ps.wire.transport import ConnectionLost, TransferTimeout

__all__ = ["Fault", "LocalTransport"]

Side = Literal["client", "server"]


@dataclass(slots=True)
class Fault:
    """What happens to the ``message``-th send (from 1, over all connections) of ``side``.

    ``drop`` loses it silently, ``cut`` loses it and the connection, ``cut_after`` delivers it and then cuts, and
    ``delay`` holds it for ``delay_s`` seconds.
    """

    side: Side
    message: int
    kind: Literal["drop", "cut", "cut_after", "delay"]
    delay_s: float = 0.0


class LocalTransport:
    """Connects endpoints of one process by queues."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.sent: dict[Side, int] = {"client": 0, "server": 0}
        self._listeners: dict[str, LocalListener] = {}
        self._lock = threading.Lock()

    def bind(self, endpoint: str) -> LocalListener:
        """Returns a listener at ``endpoint``."""
        with self._lock:
            listener = self._listeners[endpoint] = LocalListener(endpoint, self)
        return listener

    def connect(self, endpoint: str, timeout_s: float) -> LocalConnection:
        """Returns a connection to ``endpoint``."""
        with self._lock:
            listener = self._listeners.get(endpoint)
        if listener is None:
            raise ConnectionLost(f"parameter server {endpoint}: nobody listens.")
        up, down = _Pipe(), _Pipe()
        listener.offer(LocalConnection(self, "server", "local", up, down))
        return LocalConnection(self, "client", endpoint, down, up)

    def forget(self, endpoint: str) -> None:
        """Removes the listener of ``endpoint``."""
        with self._lock:
            self._listeners.pop(endpoint, None)

    def fault_for(self, side: Side) -> Fault | None:
        """Counts one send of ``side`` and returns the fault that meets it, if any."""
        with self._lock:
            self.sent[side] += 1
            for fault in self.faults:
                if fault.side == side and fault.message == self.sent[side]:
                    return fault
        return None


class LocalListener:
    """An endpoint of a :class:`LocalTransport`."""

    def __init__(self, endpoint: str, network: LocalTransport) -> None:
        self.endpoint = endpoint
        self._network = network
        self._waiting: deque[LocalConnection] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def offer(self, connection: LocalConnection) -> None:
        """Queues ``connection`` for :meth:`accept`."""
        with self._changed:
            self._waiting.append(connection)
            self._changed.notify()

    def accept(self) -> LocalConnection:
        """Returns the next connection."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                raise ConnectionLost(f"{self.endpoint} no longer listens.")
            return self._waiting.popleft()

    def close(self) -> None:
        """Stops listening."""
        self._network.forget(self.endpoint)
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class _Pipe:
    """Bytes on their way in one direction."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._changed = threading.Condition()
        self._closed = False

    def write(self, data: bytes) -> None:
        with self._changed:
            if self._closed:
                raise ConnectionLost("the peer closed the connection.")
            self._data += data
            self._changed.notify_all()

    def read(self, size: int, timeout_s: float | None) -> bytes:
        """Returns 1 to ``size`` bytes, or none after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._data or self._closed, timeout_s)
            if not self._data and self._closed:
                raise ConnectionLost("the peer closed the connection.")
            data = bytes(self._data[:size])
            del self._data[:size]
            return data

    def has_some(self, timeout_s: float) -> bool:
        """Returns whether bytes, or the end, are there within ``timeout_s``."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._data or self._closed, timeout_s))

    @property
    def is_closed(self) -> bool:
        with self._changed:
            return self._closed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class LocalConnection:
    """One end of a pair of pipes."""

    def __init__(self, network: LocalTransport, side: Side, peer: str, incoming: _Pipe, outgoing: _Pipe) -> None:
        self.peer = peer
        self.is_here = True
        self._network, self._side = network, side
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Sends all bytes of ``buffers`` in order, unless a fault meets them."""
        data = b"".join(bytes(buffer) for buffer in buffers)
        fault = self._network.fault_for(self._side)
        if fault is None:
            self._outgoing.write(data)
            return
        if fault.kind == "delay":
            time.sleep(fault.delay_s)
        if fault.kind in ("delay", "cut_after"):
            self._outgoing.write(data)
        if fault.kind in ("cut", "cut_after"):
            self.close()
            raise ConnectionLost(f"{self.peer}: cut by the test.")

    def receive(self, view: memoryview, timeout_s: float | None = None, idle_s: float | None = None) -> None:
        """Fills ``view``."""
        filled, deadline = 0, None if idle_s is None else time.monotonic() + idle_s
        while filled < len(view):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            data = self._incoming.read(len(view) - filled, left)
            if not data:
                raise TransferTimeout(f"{self.peer}: {filled} of {len(view)} bytes came in time.")
            if not filled:
                deadline = None if timeout_s is None else time.monotonic() + timeout_s
            view[filled : filled + len(data)] = data
            filled += len(data)

    def comes(self, limit_s: float) -> bool:
        """Returns whether there is something to read within ``limit_s``."""
        return self._incoming.has_some(limit_s)

    def is_cut(self) -> bool:
        """Returns whether the stream has ended."""
        return self._incoming.is_closed

    def close(self) -> None:
        """Ends the stream in both directions."""
        self._incoming.close()
        self._outgoing.close()
