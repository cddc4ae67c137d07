"""Keeps the ports a node has chosen until its processes are about to start.

Between the choice and the start another launcher on this machine could choose the same ports, or be handed one by the
kernel. A listener on each closes that gap, on one node as long as the plan takes, on several until all have met.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from types import TracebackType

from fleet.launch._records import Peer


class PortHold:
    """Listeners on ports; leaving the ``with`` block or :meth:`release` closes them."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._listeners: list[socket.socket] = []
        for port in ports:
            with contextlib.suppress(OSError):  # a name that is not an address here, or taken: the process will say so
                self._hold(host, port)

    def _hold(self, host: str, port: int) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
        except OSError:
            listener.close()
            raise
        self._listeners.append(listener)

    def __enter__(self) -> PortHold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Frees the ports; no connection was ever accepted, so they can be listened on again at once."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()


def hold_ports(peer: Peer) -> PortHold:
    """Returns a hold on every port of ``peer`` that its own processes will listen on."""
    ports = [*peer.ports, *peer.server_ports, peer.store_port, peer.http_port]
    return PortHold(peer.host, [port for port in dict.fromkeys(ports) if port])
