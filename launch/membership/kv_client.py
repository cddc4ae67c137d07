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

from fleet.common.addresses import join_endpoint
from fleet.common.sealing import PROOF_BYTES, same
from fleet.errors import LaunchError
from fleet.launch.membership import sealed_frames as _frames
from fleet.launch.membership.sealed_frames import Message
from fleet.launch.membership.store import StoreLostError, View

CONNECTIONS_OF_A_NODE = 2  # for requests, and to wait
_CONNECT_S = 2.0
_REQUEST_S = 5.0
_RETRY_S = 0.1
_REFUSED_TRIES = 3
_RECONNECT_S = 1.0  # at least this long is tried, however old the last answer is
_STOP_S = 0.8  # kept free at the end of the lease to stop the workers in


class StoreRefusedError(LaunchError):
    """The service does not take this client: the secrets differ, or it is no such service."""


class _ClosedError(StoreRefusedError):
    """The service closed the connection in the handshake: another secret, or too many strangers before it."""


class KeyValueClient:
    """Reads and writes keys; their texts are JSON.

    Args:
        address: host and port of the service.
        secret: the job's secret; empty: the nodes share no secret.
        ttl_s: the service deletes the leased keys after this long without a sign of life.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, *, ttl_s: float) -> None:
        self.address = address
        self._secret = secret
        self.ttl_s = ttl_s
        self._session: str | None = None
        self._channels: dict[str, _Channel] = {}  # "requests" and "waits"
        self._lock = threading.Lock()
        self._closed = False
        self._answered_at = 0.0

    def connect(self) -> None:
        """Opens the session; raises StoreLostError when nobody answers, StoreRefusedError when the secrets differ."""
        with self._lock:
            # A service that strangers crowd may close this connection before its proof, which looks like a refusal.
            for left in reversed(range(_REFUSED_TRIES)):
                try:
                    self._channels["requests"] = self._open(_REQUEST_S)
                    return
                except _ClosedError:
                    if not left:
                        raise
                time.sleep(_RETRY_S)

    def read(self, prefix: str) -> View:
        """Returns every key under ``prefix``."""
        return _view(prefix, self._request({"op": "read", "prefix": prefix}))

    def put(self, key: str, text: str | None, *, leased: bool = False) -> None:
        """Sets ``key``, or deletes it; with ``leased`` it goes when this session does."""
        self._request({"op": "put", "key": key, "value": text, "leased": leased})

    def swap(self, key: str, old_text: str | None, text: str | None, *, leased: bool = False) -> bool:
        """Sets ``key`` if its stored text is still ``old_text`` (None: absent); returns whether it did."""
        message = {"op": "swap", "key": key, "old": old_text, "value": text, "leased": leased}
        return bool(self._request(message)["ok"])

    def wait(self, prefix: str, revision: int, timeout_s: float) -> View:
        """Returns the keys as soon as anything is newer than ``revision``, or after ``timeout_s``; a sign of life."""
        message = {"op": "wait", "prefix": prefix, "revision": revision, "timeout_s": timeout_s}
        return _view(prefix, self._exchange("waits", message, timeout_s + self.ttl_s / 4))

    def close(self) -> None:
        """Ends the session; the leased keys are gone when it returns."""
        # Set before the lock is asked for: a request that repeats under the lock sees it and gives up.
        self._closed = True
        with contextlib.suppress(LaunchError, OSError), self._lock:
            if "requests" in self._channels:
                self._channels["requests"].request({"op": "close"}, 1.0)
        for channel in list(self._channels.values()):
            # This wakes the thread in wait() with StoreLostError.
            channel.close()

    def _request(self, message: Message) -> Message:
        with self._lock:
            return self._exchange("requests", message, self.ttl_s / 2)

    def _exchange(self, name: str, message: Message, limit_s: float) -> Message:
        """Returns the answer; connects again and repeats until this node's lease is about to end.

        The lease counts from when the last request was sent that has an answer, so who is cut off knows it before the
        service gives it up.
        """
        give_up_at = None
        while True:
            sent_at = time.monotonic()
            try:
                if name not in self._channels:
                    self._channels[name] = self._open(max(_RETRY_S, (give_up_at or sent_at + _REQUEST_S) - sent_at))
                answer = self._channels[name].request(message, limit_s)
                self._answered_at = max(self._answered_at, sent_at)
                return answer
            except (OSError, _frames.WireError, StoreLostError) as error:
                if name in self._channels:
                    self._channels.pop(name).close()
                # The service has given this node up; to connect again would not bring its keys back.
                if isinstance(error, StoreLostError):
                    raise
                now = time.monotonic()
                margin_s = min(_STOP_S, self.ttl_s / 4)
                give_up_at = give_up_at or max(self._answered_at + self.ttl_s - margin_s, now + _RECONNECT_S)
                if self._closed or now > give_up_at:
                    silent_s = now - self._answered_at
                    what = f"has not answered for {silent_s:.1f} s" if self._answered_at else "has not answered"
                    raise StoreLostError(
                        f"The rendezvous service at {join_endpoint(*self.address)} {what} ({error})."
                    ) from error
                time.sleep(_RETRY_S)

    def _open(self, limit_s: float) -> _Channel:
        try:
            channel = _Channel(self.address, self._secret, limit_s)
        except StoreRefusedError as error:
            if self._session is None:
                raise
            # The service knew this node before, so it does not refuse it: it is shutting down.
            raise ConnectionResetError(f"{error}") from error
        try:
            message: Message = {"op": "session", "ttl_s": self.ttl_s}
            if self._session is not None:
                message["resume"] = self._session
            self._session = channel.request(message, limit_s)["session"]
        except BaseException:
            channel.close()
            raise
        return channel


class _Channel:
    """One connection after its handshake; a request is answered before the next is sent."""

    def __init__(self, address: tuple[str, int], secret: bytes, limit_s: float) -> None:
        self._sock = socket.create_connection(address, timeout=min(_CONNECT_S, limit_s))
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.settimeout(limit_s)
            self._seals = self._shake_hands(address, secret)
        except BaseException:
            self._sock.close()
            raise

    def _shake_hands(self, address: tuple[str, int], secret: bytes) -> _frames.Seals:
        where = f"{address[0]}:{address[1]}"
        hello = self._receive(_frames.HELLO_BYTES)
        if not hello.startswith(_frames.MAGIC):
            raise StoreRefusedError(
                f"What listens on {where} is no Fleet rendezvous service. Choose another port for --master."
            )
        service_nonce = hello[len(_frames.MAGIC) :]
        nonce = _frames.make_nonce()
        self._sock.sendall(_frames.MAGIC + nonce + _frames.proof(secret, b"client", service_nonce, nonce))
        try:
            given = self._receive(PROOF_BYTES)
        except ConnectionError:
            given = b""
        if not same(given, _frames.proof(secret, b"service", service_nonce, nonce)):
            raise (StoreRefusedError if given else _ClosedError)(
                f"The rendezvous service at {where} refused this node: the job's secret differs. "
                "Set FLEET_JOB_SECRET to the same value on every node, or on none."
            )
        return _frames.Seals(secret, service_nonce, nonce, is_service=False)

    def request(self, message: Message, timeout_s: float) -> Message:
        """Returns the answer; raises OSError or WireError when none comes, StoreLostError when it is an error."""
        self._sock.settimeout(timeout_s)
        self._sock.sendall(self._seals.pack(message))
        header = self._receive(_frames.HEADER_BYTES)
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


def _view(prefix: str, answer: Message) -> View:
    texts = {key.removeprefix(prefix): item[0] for key, item in answer["items"].items()}
    return View(
        revision=answer["revision"],
        values={key: json.loads(text) for key, text in texts.items()},
        texts=texts,
        created={key.removeprefix(prefix): item[1] for key, item in answer["items"].items()},
    )
