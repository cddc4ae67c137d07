"""A stranger on the path: passes on what two ends of a connection say to each other, and can add words of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from fleet.common.addresses import split_endpoint

Change = Callable[[bytes], bytes]


def _unchanged(data: bytes) -> bytes:
    return data


class Relay:
    """Listens at ``endpoint`` and passes every connection on to ``target``, which may be set later.

    ``up`` and ``down`` see, and may change, what goes to the target and what comes from it.
    """

    def __init__(self, target: str = "", *, up: Change = _unchanged, down: Change = _unchanged) -> None:
        self.target, self.up, self.down = target, up, down
        self.targets: list[socket.socket] = []  # the ends towards the target, newest last
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.endpoint = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._sockets[0].accept()
                far = socket.create_connection(split_endpoint(self.target, "server"), 5)
                self._sockets += [near, far]
                self.targets.append(far)
                for source, sink, upwards in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=(source, sink, upwards), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self.up(data) if upwards else self.down(data))
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends everything."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
