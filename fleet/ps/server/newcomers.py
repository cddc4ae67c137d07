"""Connections that have not proven the secret: a few at a time, so no stranger keeps others out or fills the log."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from fleet.ps.wire.transport import Connection

MAX_ADDRESSES = 10
INTERVAL_S = 60.0


def host_of(peer: str) -> str:
    """Returns the address of a peer ``address:port``."""
    return peer.rpartition(":")[0] or peer


class Newcomers:
    """The unproven connections, oldest first; the caller does the locking."""

    def __init__(self) -> None:
        self._connections: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Connection) -> None:
        """Notes a new connection."""
        self._connections[connection] = host_of(connection.peer)

    def discard(self, connection: Connection) -> None:
        """Forgets a connection that has proven the secret, or has ended."""
        self._connections.pop(connection, None)

    def evict(self) -> Connection | None:
        """Forgets and returns the oldest connection of the address that has the most, ``None`` without any."""
        if not self._connections:
            return None
        ((address, _),) = Counter(self._connections.values()).most_common(1)
        oldest = next(one for one, where in self._connections.items() if where == address)
        self.discard(oldest)
        return oldest


class Complaints:
    """Lines about peers, at most one a minute per address and few in all; a later line counts those left out."""

    def __init__(self, notify: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._notify = notify
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # by address: when, and how many lines were left out since
        self._lock = threading.Lock()

    def say(self, address: str, line: str) -> None:
        """Says ``line``, unless there was one about ``address`` within the last minute."""
        now = self._clock()
        with self._lock:
            last, left_out = self._said.get(address, (-INTERVAL_S, 0))
            if now - last < INTERVAL_S:
                self._said[address] = last, left_out + 1
                return
            if len(self._said) >= MAX_ADDRESSES:
                self._said = {key: value for key, value in self._said.items() if now - value[0] < INTERVAL_S}
                if len(self._said) > MAX_ADDRESSES:
                    return
            self._said[address] = now, 0
            is_last = len(self._said) > MAX_ADDRESSES
        line += f" ({left_out} more like it since the last line)" if left_out else ""
        self._notify(f"{line} Lines about further addresses are left out for a minute." if is_last else line)
