"""Tells an outage of etcd from the loss of this node's own network, by asking the other launchers.

A node that cannot reach etcd must stop its workers before its lease ends, because the others may go on without it.
When no other node reaches etcd either, nobody can go on without anybody, and a healthy job need not stop. Each launcher
answers one question on a port: has etcd answered you lately? The question is a nonce, the answer one byte
and its seal under the job's secret, which covers the nonce and the name of the node that answers: who relays the
question to another node, or back to the one that asks, has no answer of the node that was asked.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Sequence

from fleet.errors import LaunchError
from fleet.launch.membership.callers import Answerer, listen
from fleet.launch.plan.ports import free_ports

_NONCE_BYTES = 16
_SEAL_BYTES = 32
_ASK_S = 0.5
_MOST = 128


class ContactAnswer:
    """Answers the other launchers while it is open; ``port`` is where.

    Args:
        host: this node's address.
        secret: the job's secret; empty: the nodes share no secret.
        name: of this node, as the others know it.
        has_contact: whether etcd has answered this node lately.
    """

    def __init__(self, host: str, secret: bytes, name: str, has_contact: Callable[[], bool]) -> None:
        self._secret = secret
        self._name = name
        self._has_contact = has_contact
        self.port = free_ports(1, host)[0]
        try:
            listener = listen(host, self.port)
        except OSError as error:
            raise LaunchError(f"Port {self.port} on {host} cannot be listened on: {error.strerror}.") from error
        self._answerer = Answerer(
            listener, self._answer, most=_MOST, limit_s=_ASK_S, longest=2 * _NONCE_BYTES, name="etcd-contact-answer"
        )

    def close(self) -> None:
        """Stops answering."""
        self._answerer.close()

    def _answer(self, nonce: bytes) -> bytes | None:
        if len(nonce) < _NONCE_BYTES:
            return None
        bit = b"1" if self._has_contact() else b"0"
        return bit + _seal(self._secret, bit + nonce[:_NONCE_BYTES], self._name)


def ask(host: str, port: int, name: str, secret: bytes) -> bool | None:
    """Returns whether etcd has answered the node ``name`` at ``host:port`` lately; None when it cannot be asked."""
    nonce = os.urandom(_NONCE_BYTES)
    try:
        with socket.create_connection((host, port), timeout=_ASK_S) as connection:
            connection.settimeout(_ASK_S)
            connection.sendall(nonce)
            answer = _receive(connection, 1 + _SEAL_BYTES)
    except (OSError, ValueError, OverflowError):
        # ValueError and OverflowError: the published host or port is no such thing.
        return None
    bit, seal = answer[:1], answer[1:]
    return bit == b"1" if hmac.compare_digest(seal, _seal(secret, bit + nonce, name)) else None


def nobody_has_contact(others: Sequence[tuple[str, int, str]], secret: bytes) -> bool:
    """Returns whether every one of ``others`` could be asked and none of them reaches etcd; False without others.

    Each is a host, a port and a name.

    A launcher that cannot be asked may have etcd and go on, so it counts against the outage.
    """
    return bool(others) and all(ask(*other, secret) is False for other in others)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        block = connection.recv(num_bytes - len(data))
        if not block:
            raise ConnectionResetError("closed")
        data += block
    return bytes(data)


def _seal(secret: bytes, text: bytes, name: str) -> bytes:
    return hmac.new(secret, b"fleet-contact " + text + name.encode(), "sha256").digest()
