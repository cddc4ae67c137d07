"""A launcher's connection to the key-value service, with a session that keeps its leased keys alive.

Two connections share the session: one for requests, one for waiting, which is also the heartbeat. No proxy variable is
ever looked at: these are plain sockets.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from fleet._sealing import PROOF_BYTES, same
from fleet.errors import LaunchError
from fleet.launch.membership import wire as _wire
from fleet.launch.membership.wire import Message

CONNECTIONS_OF_A_NODE = 2  # for requests, and to wait
_CONNECT_S = 2.0
_REQUEST_S = 5.0
_RETRY_S = 0.1
_REFUSED_TRIES = 3
_RECONNECT_S = 1.0  # at least this long is tried, however old the last answer is


class StoreLostError(LaunchError):
    """The service cannot be reached any more, or has given the session up."""


class StoreRefusedError(LaunchError):
    """The service does not take this client: the secrets differ, or it is no such service."""


class _ClosedError(StoreRefusedError):
    """The service closed the connection in the handshake, as one that strangers crowd may do too."""


@dataclass(frozen=True)
class View:
    """What lies under a prefix at one revision; ``created`` orders keys by when they came."""

    revision: int
    values: dict[str, Any] = field(default_factory=dict)  # key without the prefix -> value read from JSON
    texts: dict[str, str] = field(default_factory=dict)  # the same as stored, for compare-and-set
    created: dict[str, int] = field(default_factory=dict)
    unproved: dict[str, str] = field(default_factory=dict)  # on etcd: key -> host, of records that strangers wrote


class KeyValueClient:
    """Reads and writes the keys under ``prefix``; values are JSON.

    Args:
        address: host and port of the service.
        secret: the job's secret; empty when there is none.
        prefix: stands before every key.
        ttl_s: the service deletes the leased keys after this long without a sign of life.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, *, prefix: str, ttl_s: float) -> None:
        self._address, self._secret, self._prefix, self.ttl_s = address, secret, prefix, ttl_s
        self._session: str | None = None
        self._requests: _Channel | None = None
        self._waits: _Channel | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._answered_at = 0.0

    def connect(self) -> None:
        """Opens the session; raises StoreLostError when nobody answers, StoreRefusedError when the secrets differ."""
        with self._lock:
            for left in reversed(range(_REFUSED_TRIES)):
                try:
                    self._requests = self._open()
                    return
                except _ClosedError:
                    if not left:
                        raise
                time.sleep(_RETRY_S)

    def read(self) -> View:
        """Returns every key under the prefix."""
        return self._view(self._request({"op": "read", "prefix": self._prefix}))

    def put(self, key: str, value: object, *, leased: bool = False) -> None:
        """Sets ``key``; with ``leased`` it goes when this session does."""
        self._request({"op": "put", "key": self._prefix + key, "value": _text(value), "leased": leased})

    def swap(self, key: str, old_text: str | None, value: object, *, leased: bool = False) -> bool:
        """Sets ``key`` if its stored text is still ``old_text`` (None: absent); returns whether it did."""
        message = {"op": "swap", "key": self._prefix + key, "old": old_text, "value": _text(value), "leased": leased}
        return bool(self._request(message)["ok"])

    def wait(self, revision: int, timeout_s: float) -> View:
        """Returns the keys as soon as anything is newer than ``revision``, or after ``timeout_s``; a sign of life."""
        message = {"op": "wait", "prefix": self._prefix, "revision": revision, "timeout_s": timeout_s}
        give_up_at = None
        while True:
            try:
                if self._waits is None:
                    self._waits = self._open()
                return self._view(self._answered(self._waits.request(message, max(self.ttl_s, timeout_s + 1.0))))
            except (OSError, _wire.WireError) as error:
                if self._waits is not None:
                    self._waits.close()
                self._waits = None
                give_up_at = give_up_at or self._give_up_at()
                self._pause_or_give_up(give_up_at, error)

    def close(self) -> None:
        """Ends the session; the leased keys are gone when it returns."""
        self._closed = True
        with contextlib.suppress(LaunchError, OSError), self._lock:
            if self._requests is not None:
                self._requests.request({"op": "close"}, 1.0)
        for channel in (self._requests, self._waits):
            if channel is not None:
                channel.close()  # a thread in wait() wakes up with StoreLostError

    def _request(self, message: Message) -> Message:
        give_up_at = None
        with self._lock:
            while True:
                try:
                    if self._requests is None:
                        self._requests = self._open()
                    return self._answered(self._requests.request(message, self.ttl_s))
                except (OSError, _wire.WireError) as error:
                    if self._requests is not None:
                        self._requests.close()
                    self._requests = None
                    give_up_at = give_up_at or self._give_up_at()
                    self._pause_or_give_up(give_up_at, error)

    def _answered(self, answer: Message) -> Message:
        self._answered_at = time.monotonic()
        return answer

    def _give_up_at(self) -> float:
        """Returns when the lease is over for certain, counted from the last answer: who is cut off stops by then."""
        return max(self._answered_at + self.ttl_s, time.monotonic() + _RECONNECT_S)

    def _pause_or_give_up(self, give_up_at: float, error: Exception) -> None:
        if self._closed or time.monotonic() > give_up_at:
            host, port = self._address
            raise StoreLostError(
                f"The rendezvous service at {host}:{port} has not answered for {self.ttl_s:.0f} s ({error})."
            ) from error
        time.sleep(_RETRY_S)

    def _open(self) -> _Channel:
        try:
            channel = _Channel(self._address, self._secret)
        except StoreRefusedError as error:
            if self._session is None:
                raise
            raise ConnectionResetError(f"{error}") from error  # it knew this node before, so it is shutting down
        try:
            message: Message = {"op": "session", "ttl_s": self.ttl_s}
            if self._session is not None:
                message["resume"] = self._session
            self._session = channel.request(message, _REQUEST_S)["session"]
        except BaseException:
            channel.close()
            raise
        return channel

    def _view(self, answer: Message) -> View:
        cut = len(self._prefix)
        texts = {key[cut:]: item[0] for key, item in answer["items"].items()}
        return View(
            revision=answer["revision"],
            values={key: json.loads(text) for key, text in texts.items()},
            texts=texts,
            created={key[cut:]: item[1] for key, item in answer["items"].items()},
        )


class _Channel:
    """One connection after its handshake; a request is answered before the next is sent."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self._sock = socket.create_connection(address, timeout=_CONNECT_S)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._seals = self._shake_hands(address, secret)
        except BaseException:
            self._sock.close()
            raise

    def _shake_hands(self, address: tuple[str, int], secret: bytes) -> _wire.Seals:
        self._sock.settimeout(_REQUEST_S)
        where = f"{address[0]}:{address[1]}"
        hello = self._receive(_wire.HELLO_BYTES)
        if not hello.startswith(_wire.MAGIC):
            raise StoreRefusedError(
                f"What listens on {where} is no Fleet rendezvous service. Choose another port for --master."
            )
        service_nonce, nonce = hello[len(_wire.MAGIC) :], _wire.make_nonce()
        self._sock.sendall(_wire.MAGIC + nonce + _wire.proof(secret, b"client", service_nonce, nonce))
        try:
            given = self._receive(PROOF_BYTES)
        except ConnectionError:
            given = b""
        if not same(given, _wire.proof(secret, b"service", service_nonce, nonce)):
            raise (StoreRefusedError if given else _ClosedError)(
                f"The rendezvous service at {where} refused this node: the job's secret differs. "
                "Set FLEET_JOB_SECRET to the same value on every node, or on none."
            )
        return _wire.Seals(secret, service_nonce, nonce, is_service=False)

    def request(self, message: Message, timeout_s: float) -> Message:
        """Returns the answer; raises OSError or WireError when there is none, StoreLostError when it is an error."""
        self._sock.settimeout(timeout_s)
        self._sock.sendall(self._seals.pack(message))
        header = self._receive(_wire.HEADER_BYTES)
        answer = self._seals.unpack(header, self._receive(self._seals.body_bytes(header)))
        if "error" in answer:
            raise StoreLostError(f"The rendezvous service has given this node up: {answer['error']}.")
        return answer

    def close(self) -> None:
        """Closes the connection; a thread that reads from it wakes up."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _receive(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            block = self._sock.recv(num_bytes - len(data))
            if not block:
                raise ConnectionResetError("the service closed the connection")
            data += block
        return bytes(data)


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value, sort_keys=True)
