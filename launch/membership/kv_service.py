"""The key-value service where the launchers of a job meet: keys, revisions, leases, compare-and-set, waiting.

One thread and one selector serve every connection; no request blocks another. The semantics are those of etcd, cut
down to what a rendezvous needs, so that the rendezvous does not care which of the two it runs on:

- every change gives the store the next revision; a key remembers the revision that created it;
- a leased key lives as long as the session that wrote it. A session ends when it says so, when it was silent for its
  time to live, or a moment after its last connection broke.

Several jobs may share one service; their keys differ by prefix. State is bounded: size of a key, of a value, of all.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.common.own_thread import OwnThread
from fleet.common.sealing import same
from fleet.launch.membership import sealed_frames as _frames
from fleet.launch.membership.callers import accept, most_connections
from fleet.launch.membership.sealed_frames import Message, WireError

MAX_KEY_CHARACTERS = 512
MAX_VALUE_CHARACTERS = 1 << 20
MAX_STORE_CHARACTERS = 64 << 20
MAX_CONNECTIONS = 4096
_HANDSHAKE_S = 5.0
_TICK_S = 0.1
# A launcher that was killed closes its connections at once; one whose network hiccups gets this long to come back.
_RECONNECT_S = 1.0
_MAX_WAIT_S = 60.0


@dataclass
class _Item:
    value: str
    created: int
    session: str | None


@dataclass
class _Session:
    ttl_s: float
    expires_at: float
    connections: set[int] = field(default_factory=set)


class ServiceState:
    """The state of the service; every method is called with the time, so that tests need no clock."""

    def __init__(self) -> None:
        self.revision = 0
        self.items: dict[str, _Item] = {}
        self.sessions: dict[str, _Session] = {}
        self._size = 0

    def open_session(self, ttl_s: float, now: float) -> str:
        """Returns the name of a new session; it is a secret of its owner."""
        name = os.urandom(16).hex()
        self.sessions[name] = _Session(ttl_s, now + ttl_s)
        return name

    def touch(self, session: str | None, now: float) -> bool:
        """Prolongs a session; returns False when it has ended."""
        if session is None:
            return True
        if session not in self.sessions:
            return False
        self.sessions[session].expires_at = now + self.sessions[session].ttl_s
        return True

    def end_session(self, name: str) -> None:
        """Deletes the session and every key it leased."""
        self.sessions.pop(name, None)
        for key in [key for key, item in self.items.items() if item.session == name]:
            self.put(key, None, None)

    def expire(self, now: float) -> None:
        """Ends every session whose time is over."""
        for name in [name for name, session in self.sessions.items() if session.expires_at <= now]:
            self.end_session(name)

    def view(self, prefix: str) -> Message:
        """Returns the revision and ``key -> [value, revision of its creation]`` of every key under ``prefix``."""
        items = {key: [item.value, item.created] for key, item in self.items.items() if key.startswith(prefix)}
        return {"revision": self.revision, "items": items}

    def swap(self, key: str, old: str | None, new: str | None, session: str | None) -> bool:
        """Sets ``key`` to ``new`` if it holds ``old`` (None: absent); returns whether it did."""
        item = self.items.get(key)
        if (item.value if item else None) != old:
            return False
        self.put(key, new, session)
        return True

    def put(self, key: str, value: str | None, session: str | None) -> None:
        """Sets ``key``, or deletes it."""
        before = self.items.get(key)
        size = self._size - (len(key) + len(before.value) if before else 0)
        if value is not None:
            size += len(key) + len(value)
            if size > MAX_STORE_CHARACTERS:
                raise WireError(f"The store is full: {MAX_STORE_CHARACTERS} characters.")
        elif before is None:
            return
        self._size = size
        self.revision += 1
        if value is None:
            del self.items[key]
        else:
            self.items[key] = _Item(value, before.created if before else self.revision, session)


class _Connection:
    """One client: handshake state, unread bytes, unsent bytes, and the wait it is parked in."""

    def __init__(self, sock: socket.socket, address: str, now: float) -> None:
        self.sock = sock
        self.address = address
        self.opened_at = now
        self.nonce = _frames.make_nonce()
        self.seals: _frames.Seals | None = None
        self.received = bytearray()
        self.unsent = bytearray(_frames.MAGIC + self.nonce)
        self.session: str | None = None
        self.parked: tuple[str, int, float] | None = None  # prefix, revision, deadline


class KeyValueService:
    """Serves a :class:`ServiceState` on ``listener`` from one thread until :meth:`close`.

    Args:
        listener: a listening socket, bound to this node's address.
        secret: the job's secret; empty to take every client.
        refused: called with the address of a client that was turned away, and why.
    """

    def __init__(self, listener: socket.socket, secret: bytes, refused: Callable[[str, str], None]) -> None:
        self._listener = listener
        self._secret = secret
        self._refused = refused
        self._store = ServiceState()
        self._most = most_connections(MAX_CONNECTIONS)
        self._connections: dict[int, _Connection] = {}
        self._unproven: dict[int, _Connection] = {}  # those of them that have not proved the secret, the oldest first
        self._ticked_at = 0.0
        self._ticked_revision = 0
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = OwnThread(self._serve, name="key-value-service")
        self._thread.start()

    def num_sessions(self) -> int:
        """Returns how many sessions are alive: launchers that still need the service."""
        return len(self._store.sessions)

    def check(self) -> None:
        """Raises the error that has ended the service, if one has."""
        self._thread.check()

    def close(self) -> None:
        """Stops serving; every connection and the port are closed when it returns."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                for key, mask in self._selector.select(_TICK_S):
                    if key.data is None:
                        self._accept()
                    elif key.data.sock.fileno() >= 0:
                        # A connection of this round may have been closed to make room for a caller of the same round.
                        self._serve_connection(key.data, mask)
                self._tick(time.monotonic())
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        accepted = accept(self._listener, self._make_room)
        if accepted is None:
            return
        sock, address = accepted
        if len(self._connections) >= self._most and not self._make_room():
            self._refused(address, f"{self._most} launchers' connections are all that the limit of open files allows")
            sock.close()
            return
        connection = _Connection(sock, address, time.monotonic())
        self._connections[sock.fileno()] = self._unproven[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        try:
            # Messages are small and wait for each other, so none may be held back to be sent with the next.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._flush(connection)
        except OSError:
            # The caller has gone again.
            self._drop(connection)

    def _make_room(self) -> bool:
        """Closes the connection that has been unproven for the longest time; returns whether there was one."""
        for connection in self._unproven.values():
            self._drop(connection)
            self._refused(connection.address, "it had proved nothing, and the next one needed its place")
            return True
        return False

    def _serve_connection(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(connection)
            if mask & selectors.EVENT_READ:
                self._read(connection)
        except Exception:  # noqa: BLE001 - whatever one launcher sends, the others are served
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(1 << 16)
        if not data:
            self._drop(connection)
            return
        connection.received += data
        if connection.seals is None:
            self._check_answer(connection)
        while connection.seals is not None and connection.sock.fileno() >= 0:
            message = self._next_message(connection, connection.seals)
            if message is None:
                return
            self._answer(connection, message)

    def _check_answer(self, connection: _Connection) -> None:
        """Ends the connection unless the client proves that it knows the secret; nothing is parsed before that."""
        received = connection.received
        known = len(_frames.MAGIC)
        # Compares as far as bytes have come, so that another protocol is dropped at its first wrong byte.
        if received[:known] != _frames.MAGIC[: len(received)]:
            self._drop(connection)
            return
        if len(received) < _frames.ANSWER_BYTES:
            return
        answer = bytes(received[: _frames.ANSWER_BYTES])
        del received[: _frames.ANSWER_BYTES]
        nonce, given = answer[known : known + _frames.NONCE_BYTES], answer[known + _frames.NONCE_BYTES :]
        if not same(given, _frames.proof(self._secret, b"client", connection.nonce, nonce)):
            self._drop(connection)
            self._refused(connection.address, "it does not know this job's secret (FLEET_JOB_SECRET)")
            return
        del self._unproven[connection.sock.fileno()]
        connection.seals = _frames.Seals(self._secret, connection.nonce, nonce, is_service=True)
        self._send(connection, _frames.proof(self._secret, b"service", connection.nonce, nonce))

    def _next_message(self, connection: _Connection, seals: _frames.Seals) -> Message | None:
        received = connection.received
        if len(received) < _frames.HEADER_BYTES:
            return None
        header = bytes(received[: _frames.HEADER_BYTES])
        end = _frames.HEADER_BYTES + seals.body_bytes(header)
        if len(received) < end:
            return None
        body = bytes(received[_frames.HEADER_BYTES : end])
        del received[:end]
        return seals.unpack(header, body)

    def _answer(self, connection: _Connection, message: Message) -> None:
        now = time.monotonic()
        operation = message["op"]
        if operation == "session":
            self._open_session(connection, message, now)
            return
        if not self._store.touch(connection.session, now):
            self._reply(connection, {"error": "the session has ended"})
            return
        if operation == "wait":
            deadline = now + min(_MAX_WAIT_S, float(message["timeout_s"]))
            connection.parked = (_key(message["prefix"]), int(message["revision"]), deadline)
            self._unpark(connection, now)
        elif operation == "read":
            self._reply(connection, self._store.view(_key(message["prefix"])))
        elif operation in ("put", "swap"):
            self._change(connection, message)
        elif operation == "close":
            if connection.session is not None:
                self._store.end_session(connection.session)
            self._reply(connection, {"ok": True})
        else:
            raise WireError(f"No operation {operation!r}.")

    def _open_session(self, connection: _Connection, message: Message, now: float) -> None:
        name = message.get("resume")
        if name is None:
            name = self._store.open_session(min(600.0, max(0.5, float(message["ttl_s"]))), now)
        if not self._store.touch(name, now):
            self._reply(connection, {"error": "the session has ended"})
            return
        connection.session = name
        # _drop() shortens the lease of a session only when the last of its connections has broken.
        self._store.sessions[name].connections.add(connection.sock.fileno())
        self._reply(connection, {"session": name})

    def _change(self, connection: _Connection, message: Message) -> None:
        key = _key(message["key"])
        new = _value(message["value"])
        session = connection.session if message.get("leased") else None
        if message["op"] == "put":
            self._store.put(key, new, session)
            self._reply(connection, {"ok": True})
        else:
            self._reply(connection, {"ok": self._store.swap(key, _value(message["old"]), new, session)})

    def _tick(self, now: float) -> None:
        """Expires sessions and answers waits; not at each of a stranger's bytes, as it looks at every connection."""
        if now - self._ticked_at < _TICK_S and self._store.revision == self._ticked_revision:
            return
        self._store.expire(now)
        self._ticked_at = now
        self._ticked_revision = self._store.revision
        for connection in list(self._connections.values()):
            if connection.seals is None and now - connection.opened_at > _HANDSHAKE_S:
                self._drop(connection)
            elif connection.parked is not None:
                with contextlib.suppress(OSError, WireError):
                    self._unpark(connection, now)

    def _unpark(self, connection: _Connection, now: float) -> None:
        assert connection.parked is not None
        prefix, revision, deadline = connection.parked
        if self._store.revision > revision or now >= deadline:
            connection.parked = None
            # A waiting request is the sign of life, so the lease counts from its answer.
            self._store.touch(connection.session, now)
            self._reply(connection, self._store.view(prefix))

    def _reply(self, connection: _Connection, message: Message) -> None:
        assert connection.seals is not None
        self._send(connection, connection.seals.pack(message))

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.unsent += data
        # A client that asks and never reads would fill the memory of this launcher.
        if len(connection.unsent) > 2 * _frames.MAX_FRAME_BYTES:
            raise WireError("The client does not read its answers.")
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        with contextlib.suppress(BlockingIOError):
            while connection.unsent:
                del connection.unsent[: connection.sock.send(connection.unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        number = connection.sock.fileno()
        if number < 0:
            return
        self._selector.unregister(connection.sock)
        connection.sock.close()
        del self._connections[number]
        self._unproven.pop(number, None)
        session = self._store.sessions.get(connection.session or "")
        if session is not None:
            # A session whose last connection broke has a moment to connect again, not the rest of its lease.
            session.connections.discard(number)
            if not session.connections:
                session.expires_at = min(session.expires_at, time.monotonic() + _RECONNECT_S)


def _key(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_KEY_CHARACTERS:
        raise WireError(f"A key is text of at most {MAX_KEY_CHARACTERS} characters.")
    return value


def _value(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_VALUE_CHARACTERS):
        raise WireError(f"A value is text of at most {MAX_VALUE_CHARACTERS} characters.")
    return value
