"""Ports that anybody can reach: how many connections one may hold, and which callers are turned away beyond that.

A descriptor is all that an idle stranger needs to take, so a port holds fewer connections than the process may have
open files. Where there is no room the caller closes the connection that has proved nothing for the longest time: who
belongs here proves it within milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.common.own_thread import OwnThread

# Left for processes, their log files and the rest of this process; of a low limit, half.
_OTHER_FILES = 256
_TICK_S = 0.1
_SAY_AGAIN_S = 60.0
_MOST_NAMES = 10


def most_connections(wanted: int) -> int:
    """Returns how many connections a port may hold: ``wanted``, or as many as the limit of open files leaves."""
    # resource does not exist on Windows, where workers of a server may still run.
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - min(_OTHER_FILES, limit // 2)))


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at ``host:port``; raises OSError when it cannot."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket, make_room: Callable[[], bool]) -> tuple[socket.socket, str] | None:
    """Returns a new connection that does not block, and its address; None when nobody waits.

    When this process has no descriptor left, ``make_room`` is asked to close a connection.
    """
    try:
        sock, address = listener.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and not make_room():
            # No file is free. The caller stays in the queue and would be announced again at once.
            time.sleep(_TICK_S)
        return None
    sock.setblocking(False)
    return sock, f"{address[0]}:{address[1]}"


class Seldom:
    """Says something about a host at most once in each minute, and about few hosts, however often it has reason to.

    Args:
        say: receives the line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = set[str]()
        self._since = 0.0

    def __call__(self, host: str, line: str, now: float | None = None) -> None:
        """Says ``line`` unless one about ``host``, or that more are left out, was said in this minute."""
        now = time.monotonic() if now is None else now
        if now - self._since >= _SAY_AGAIN_S:
            self._since = now
            self._said = set()
        if host not in self._said and len(self._said) <= _MOST_NAMES:
            self._said.add(host)
            is_last = len(self._said) > _MOST_NAMES
            self._say(f"{line} Lines about further addresses are left out for a minute." if is_last else line)


@dataclass
class _Caller:
    sock: socket.socket
    opened_at: float
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""


class Answerer:
    """Answers one question on each connection to ``listener`` and closes it, from one thread, until :meth:`close`.

    Nobody is asked for a proof, so nobody is waited for: a question is answered as soon as it is whole, a connection
    lasts ``limit_s`` at most, and when ``most`` are open the oldest one makes room.

    Args:
        listener: a listening socket; it is closed in the end.
        answer: returns the answer to the bytes received so far, or None while the question is not whole.
        most: how many connections may be open.
        limit_s: how long one may be open.
        longest: a question has fewer bytes; a longer one ends its connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[bytes], bytes | None],
        *,
        most: int,
        limit_s: float,
        longest: int,
        name: str,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._most = most_connections(most)
        self._limit_s = limit_s
        self._longest = longest
        self._callers: dict[int, _Caller] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = OwnThread(self._run, name=name)
        self._thread.start()

    def close(self) -> None:
        """Stops answering; the port and every connection are closed when it returns."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(_TICK_S):
                    if key.data is None:
                        self._accept()
                    elif (caller := self._callers.get(key.fd)) is not None and caller is key.data:
                        # A caller that was closed to make room may have left its descriptor number to another one.
                        self._serve(caller)
                while self._callers and time.monotonic() - self._oldest().opened_at > self._limit_s:
                    self._drop_oldest()
        finally:
            while self._callers:
                self._drop_oldest()
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        if len(self._callers) >= self._most:
            self._drop_oldest()
        accepted = accept(self._listener, self._drop_oldest)
        if accepted is not None:
            caller = _Caller(accepted[0], time.monotonic())
            self._callers[caller.sock.fileno()] = caller
            self._selector.register(caller.sock, selectors.EVENT_READ, caller)
            # The first message has often come with the connection, and then needs no round of the selector.
            self._serve(caller)

    def _serve(self, caller: _Caller) -> None:
        try:
            if not caller.unsent and not self._hear(caller):
                return
            caller.unsent = caller.unsent[caller.sock.send(caller.unsent) :]
            if caller.unsent:
                self._selector.modify(caller.sock, selectors.EVENT_WRITE, caller)
                return
        except BlockingIOError:
            return
        except Exception:  # noqa: BLE001 - whatever one caller brings about, the others get their answers
            pass
        self._drop(caller)

    def _hear(self, caller: _Caller) -> bool:
        """Reads; returns whether there is something to send, and raises OSError when the connection is to be closed."""
        block = caller.sock.recv(1 << 16)
        caller.received += block
        answer = self._answer(bytes(caller.received))
        if answer is None and (not block or len(caller.received) >= self._longest):
            raise ConnectionResetError("closed, or longer than a question")
        caller.unsent = answer or b""
        return answer is not None

    def _oldest(self) -> _Caller:
        return next(iter(self._callers.values()))

    def _drop_oldest(self) -> bool:
        if self._callers:
            self._drop(self._oldest())
            return True
        return False

    def _drop(self, caller: _Caller) -> None:
        self._callers.pop(caller.sock.fileno())
        self._selector.unregister(caller.sock)
        with contextlib.suppress(OSError):
            caller.sock.close()
