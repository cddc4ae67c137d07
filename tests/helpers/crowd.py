"""A returning attacker: idle connections that come back."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Crowd:
    """A returning attacker: ``count`` idle connections to a port, each opened again as soon as it is closed."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self._address, self._count = address, count
        self._over = threading.Event()
        self.num_opened = 0
        self.is_full = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Crowd:
        self._thread.start()
        assert self.is_full.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            while not self._over.is_set():
                if len(selector.get_map()) < self._count:
                    self._open(selector)
                for key, _ in selector.select(0 if len(selector.get_map()) < self._count else 0.01):
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    with contextlib.suppress(OSError):
                        if sock.recv(100):  # a greeting
                            continue
                    selector.unregister(sock)
                    sock.close()
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _open(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            selector.register(socket.create_connection(self._address, timeout=2), selectors.EVENT_READ)
        self.num_opened += 1
        if self.num_opened >= 2 * self._count:
            self.is_full.set()
