"""The transport seam, and its socket form: blocking TCP or Unix sockets, TLS when a context is given.

A transport binds and connects; a listener accepts; a connection sends and receives whole messages. Everything above
knows only these protocols, so the tests run the same server over queues in memory. Sockets are opened directly: proxy
settings of the environment play no part.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import stat
import struct
import time
from collections.abc import Sequence
from typing import Protocol

from fleet.common.addresses import is_loopback, join_endpoint, split_endpoint
from fleet.errors import PSError
from fleet.ps.wire.messages import Buffer

_TICK_S = 1.0  # how often a blocked call checks its deadline
_MAX_VECTORS = 512  # below IOV_MAX of all systems
_BUFFER_BYTES = 4 << 20


class ConnectionLost(PSError):
    """The peer closed the connection, or the network did."""


class PeerRefused(PSError):
    """The peer is not who it should be, or does not speak TLS; trying again does not help."""


class TransferTimeout(PSError, TimeoutError):
    """The peer did not send or take the bytes in time."""


class Connection(Protocol):
    """One stream between a worker and a server."""

    peer: str
    is_here: bool  # both ends are on one machine, without TLS; False where that is not known

    def send(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Sends all bytes of ``buffers`` in order."""

    def receive(self, view: memoryview, timeout_s: float | None = None, idle_s: float | None = None) -> None:
        """Fills ``view``.

        The first byte may take ``idle_s`` seconds (None: no limit), the rest ``timeout_s`` from then on.

        Raises:
            ConnectionLost: the stream ended.
            TransferTimeout: a limit has passed.
        """

    def comes(self, limit_s: float) -> bool:
        """Waits at most ``limit_s`` seconds for what :meth:`receive` reads or raises; returns whether it is there.

        With TLS it returns True at once.
        """

    def is_cut(self) -> bool:
        """Returns whether the peer has ended the stream, or the network has; bytes may still be there to be read."""

    def close(self) -> None:
        """Ends the stream; a call that blocks in another thread returns with :class:`ConnectionLost`."""


class Acceptor(Protocol):
    """An endpoint that takes connections."""

    endpoint: str

    def accept(self) -> Connection:
        """Returns the next connection; raises :class:`ConnectionLost` once the listener is closed."""

    def close(self) -> None:
        """Stops listening."""


class Transport(Protocol):
    """How connections are made."""

    def bind(self, endpoint: str) -> Acceptor:
        """Returns a listener at ``endpoint``; port 0 takes a free one, see the listener's ``endpoint``."""

    def connect(self, endpoint: str, timeout_s: float) -> Connection:
        """Returns a connection to ``endpoint``; raises :class:`ConnectionLost` when nobody answers."""


def stays_here(endpoint: str) -> bool:
    """Returns whether only this machine can reach ``endpoint``."""
    return endpoint.startswith("unix:") or is_loopback(_host_and_port(endpoint)[0])


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Port 0 takes a free one."""
    return split_endpoint(endpoint, "the parameter server endpoint", lowest_port=0)


class SocketTransport:
    """Connects ``host:port`` by TCP and ``unix:/path`` by a Unix socket; by TLS when contexts are given.

    ``bound`` is a socket that is bound already; it is used for its port instead of a new one.
    """

    def __init__(
        self,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 5.0,
        bound: socket.socket | None = None,
    ) -> None:
        self._server_tls = server_tls
        self._client_tls = client_tls
        self._bound = bound
        self._handshake_timeout_s = handshake_timeout_s

    def bind(self, endpoint: str) -> SocketListener:
        """Returns a listener at ``endpoint``."""
        if endpoint.startswith("unix:"):
            return SocketListener(_bind_unix(endpoint[5:]), endpoint, None, self._handshake_timeout_s)
        host, port = _host_and_port(endpoint)
        held = self._bound if self._bound is not None and self._bound.getsockname()[:2] == (host, port) else None
        sock = _listen(endpoint, host, port, held)
        bound = join_endpoint(host, sock.getsockname()[1])
        return SocketListener(sock, bound, self._server_tls, self._handshake_timeout_s)

    def connect(self, endpoint: str, timeout_s: float) -> Connection:
        """Returns a connection to ``endpoint``."""
        try:
            if endpoint.startswith("unix:"):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(timeout_s)
                try:
                    sock.connect(endpoint[5:])
                except OSError:
                    sock.close()
                    raise
                return SocketConnection(sock, endpoint)
            host, port = _host_and_port(endpoint)
            sock = socket.create_connection((host, port), timeout_s)
            if self._client_tls is None:
                return SocketConnection(sock, endpoint)
            return _shake_hands(_wrap_tls(self._client_tls, sock, endpoint, timeout_s, host), endpoint, host)
        except PSError:  # is an OSError
            raise
        except OSError as error:
            raise ConnectionLost(f"parameter server {endpoint}: {error}.") from None


def _listen(endpoint: str, host: str, port: int, bound: socket.socket | None) -> socket.socket:
    """Returns a listening socket: ``bound``, or a new one at ``host`` and ``port``."""
    sock = bound or socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if bound is None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((_bind_host(host), port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise PSError(f"the parameter server cannot listen on {endpoint!r}: {error}. Choose a free port.") from None
    return sock


def _bind_host(host: str) -> str:
    """Returns where to listen for a server at ``host``: on all interfaces for a name that means loopback only here.

    Debian and Ubuntu map a machine's own name to 127.0.1.1, and the other nodes see its real address.
    """
    if host.strip("0123456789.") and ":" not in host and host != "localhost":
        return "" if socket.gethostbyname(host).startswith("127.") else host
    return host


def _bind_unix(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)  # left by a server that was killed
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        # Before it listens, so that no other user of the machine can connect.
        os.chmod(path, 0o600)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise PSError(f"the parameter server cannot listen on {path!r}: {error}.") from None
    return sock


def _wrap_tls(
    context: ssl.SSLContext, sock: socket.socket, peer: str, timeout_s: float, host: str | None = None
) -> ssl.SSLSocket:
    """Returns the socket before its handshake, so that another thread can close it."""
    try:
        sock.settimeout(timeout_s)
        return context.wrap_socket(sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:
        sock.close()
        raise ConnectionLost(f"{peer}: TLS: {error}.") from None


def _shake_hands(sock: ssl.SSLSocket, peer: str, host: str | None = None) -> TlsConnection:
    try:
        sock.do_handshake()
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise PeerRefused(
            f"parameter server {peer} is not trusted: {error.verify_message}. Its certificate must name {host!r}, be "
            "signed by the authority in FLEET_PS_CA, and be valid today."
        ) from None
    except (OSError, ValueError) as error:
        sock.close()
        if getattr(error, "reason", None) == "WRONG_VERSION_NUMBER":
            raise PeerRefused(
                f"parameter server {peer} does not speak TLS, but FLEET_PS_CA requires it. Set FLEET_PS_CERT for the "
                "servers, or omit FLEET_PS_CA."
            ) from None
        raise ConnectionLost(f"{peer}: TLS: {error}.") from None
    return TlsConnection(sock, peer)


class SocketListener:
    """A listening socket."""

    def __init__(
        self, sock: socket.socket, endpoint: str, tls: ssl.SSLContext | None, handshake_timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self._sock = sock
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._closed = False

    def accept(self) -> Connection:
        """Returns the next connection; its TLS handshake runs in the thread that first uses it."""
        while True:
            try:
                sock, address = self._sock.accept()
                break
            except OSError as error:
                if self._closed or self._sock.fileno() < 0:
                    raise ConnectionLost(f"{self.endpoint} no longer listens: {error}.") from None
                time.sleep(0.05)  # the peer hung up, or no file descriptor is left: try again
        peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix"
        if self._tls is None:
            return SocketConnection(sock, peer)
        return _LateTls(self._tls, sock, peer, self._handshake_timeout_s)

    def close(self) -> None:
        """Stops listening and removes the path of a Unix socket."""
        self._closed = True
        _end(self._sock)
        if self.endpoint.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.endpoint[5:])


class _Stream:
    """The socket of a connection: what does not depend on how bytes are sent."""

    is_here = False
    _sock: socket.socket

    def comes(self, limit_s: float) -> bool:
        """Returns True: with TLS, bytes that were decrypted already do not show on the socket."""
        return True

    def is_cut(self) -> bool:
        """Returns whether the stream has ended."""
        poll = select.poll()
        try:
            # Without POLLRDHUP only the events that poll reports in any case are seen.
            poll.register(self._sock, getattr(select, "POLLRDHUP", 0))
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Ends the stream."""
        _end(self._sock)


class SocketConnection(_Stream):
    """A plain socket: usually one ``sendmsg`` and one ``recv_into`` per message."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self.is_here = _is_here(sock)
        self._sock = sock
        sock.settimeout(None)
        # Timeouts of the kernel: with settimeout Python would make the socket non-blocking and poll before each
        # transfer.
        tick = struct.pack("@ll", int(_TICK_S), int(_TICK_S % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        if sock.family != socket.AF_UNIX:
            # Messages are sent whole: waiting for more bytes to fill a packet would only delay them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            if sock.family == socket.AF_UNIX:  # TCP sizes its own buffers better
                sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Sends all bytes of ``buffers`` in order."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        first = 0
        while first < len(views):
            try:
                sent = self._sock.sendmsg(views[first : first + _MAX_VECTORS])
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionLost(f"{self.peer}: {error}.") from None
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]
            if first < len(views) and deadline is not None and time.monotonic() > deadline:
                raise TransferTimeout(f"{self.peer} did not take a message within {timeout_s} s.")

    def receive(self, view: memoryview, timeout_s: float | None = None, idle_s: float | None = None) -> None:
        """Fills ``view``."""
        # Reads return once per tick, so they cannot keep a limit that is shorter.
        if idle_s is not None and idle_s < _TICK_S and not self.comes(idle_s):
            raise TransferTimeout(f"{self.peer}: no byte came within {idle_s} s.")
        began = time.monotonic()
        limit = idle_s
        filled = 0
        size = len(view)
        while filled < size:
            try:
                count = self._sock.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                count = -1
            except (OSError, ValueError) as error:
                raise ConnectionLost(f"{self.peer}: {error}.") from None
            if count == 0:
                raise ConnectionLost(f"{self.peer} closed the connection.")
            if count > 0:
                if not filled:
                    # The first byte ends the idle time: from now on the peer is sending.
                    limit = timeout_s
                    began = time.monotonic()
                filled += count
            if filled < size and limit is not None and time.monotonic() - began > limit:
                raise TransferTimeout(f"{self.peer}: {filled} of {size} bytes came within {limit} s.")

    def comes(self, limit_s: float) -> bool:
        """Returns whether there is something to read within ``limit_s``."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(1000 * limit_s))
        except (OSError, ValueError):
            return True  # closed by another thread: the read reports it


def _end(sock: socket.socket) -> None:
    # A close alone does not wake a thread that blocks in a read.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _is_here(sock: socket.socket) -> bool:
    if sock.family == socket.AF_UNIX:
        return True
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:
        return False  # closed by another thread


class TlsConnection(_Stream):
    """A TLS socket; about four times the processor time of a plain one."""

    def __init__(self, sock: ssl.SSLSocket, peer: str) -> None:
        self.peer = peer
        self._sock = sock

    def send(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Sends all bytes of ``buffers`` in order."""
        try:
            self._sock.settimeout(timeout_s)
            for buffer in buffers:
                if len(buffer):
                    self._sock.sendall(buffer)
        except TimeoutError:
            raise TransferTimeout(f"{self.peer} did not take a message within {timeout_s} s.") from None
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"{self.peer}: {error}.") from None

    def receive(self, view: memoryview, timeout_s: float | None = None, idle_s: float | None = None) -> None:
        """Fills ``view``."""
        deadline = None if idle_s is None else time.monotonic() + idle_s
        filled = 0
        while filled < len(view):
            try:
                # A timeout of 0 would make the socket non-blocking.
                self._sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
                count = self._sock.recv_into(view[filled:])
            except TimeoutError:
                raise TransferTimeout(f"{self.peer}: {filled} of {len(view)} bytes came in time.") from None
            except (OSError, ValueError) as error:
                raise ConnectionLost(f"{self.peer}: {error}.") from None
            if count == 0:
                raise ConnectionLost(f"{self.peer} closed the connection.")
            if not filled:
                deadline = None if timeout_s is None else time.monotonic() + timeout_s
            filled += count


class _LateTls(_Stream):
    """An accepted socket whose TLS handshake happens at its first use, so that accepting never waits for a peer."""

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._context = context
        self._sock = sock
        self._timeout_s = timeout_s
        self._inner: TlsConnection | None = None

    def _ready(self, limit_s: float | None) -> TlsConnection:
        if self._inner is None:
            timeout_s = self._timeout_s if limit_s is None else min(limit_s, self._timeout_s)
            self._sock = wrapped = _wrap_tls(self._context, self._sock, self.peer, timeout_s)
            self._inner = _shake_hands(wrapped, self.peer)
        return self._inner

    def send(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        self._ready(timeout_s).send(buffers, timeout_s)

    def receive(self, view: memoryview, timeout_s: float | None = None, idle_s: float | None = None) -> None:
        self._ready(idle_s).receive(view, timeout_s, idle_s)
