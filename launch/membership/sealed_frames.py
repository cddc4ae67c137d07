"""The bytes between a launcher and the key-value service: a handshake, then sealed frames of JSON.

Handshake, with HMAC-SHA256 keyed by the job's secret::

    service -> client   magic, service nonce
    client  -> service  magic, client nonce, proof("client", service nonce, client nonce)
    service -> client   proof("service", service nonce, client nonce)

Each frame is a length, a seal and a body. The seal is an HMAC over direction, frame number and body under a key of
this connection alone, so nothing can be changed, replayed or injected by one who does not know the secret. A frame
longer than the cap ends the connection before its body is read; the seal is checked before the body is parsed.

Without a secret the same bytes flow under an empty key: that keeps accidental strangers out, not attackers.
"""

from __future__ import annotations

import json
import os
from typing import Any

from fleet.common.sealing import PROOF_BYTES, SEAL_BYTES, MessageSeals, prove, same
from fleet.errors import LaunchError

MAGIC = b"FLEETKV1"
NONCE_BYTES = 16
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
HEADER_BYTES = 4 + SEAL_BYTES
MAX_FRAME_BYTES = 4 << 20

Message = dict[str, Any]


class WireError(LaunchError):
    """The other end broke the protocol or does not know the secret."""


def make_nonce() -> bytes:
    """Returns a fresh nonce."""
    return os.urandom(NONCE_BYTES)


def proof(secret: bytes, side: bytes, service_nonce: bytes, client_nonce: bytes) -> bytes:
    """Returns the proof of ``secret`` for these two nonces."""
    return prove(secret, b"fleet-kv " + side + b"\0" + service_nonce + client_nonce)


class Seals:
    """Seals the frames that one end of a connection sends, and checks those it receives."""

    def __init__(self, secret: bytes, service_nonce: bytes, client_nonce: bytes, *, is_service: bool) -> None:
        self._seals = MessageSeals(proof(secret, b"connection", service_nonce, client_nonce), is_server=is_service)

    def pack(self, message: Message) -> bytes:
        """Returns the frame of ``message``."""
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"A message of {len(body)} bytes exceeds the cap of {MAX_FRAME_BYTES} bytes.")
        return len(body).to_bytes(4, "big") + self._seals.sent(body) + body

    def body_bytes(self, header: bytes) -> int:
        """Returns how long the body behind ``header`` is; raises WireError above the cap."""
        length = int.from_bytes(header[:4], "big")
        if length > MAX_FRAME_BYTES:
            raise WireError(f"A frame of {length} bytes exceeds the cap of {MAX_FRAME_BYTES} bytes.")
        return length

    def unpack(self, header: bytes, body: bytes) -> Message:
        """Returns the message in ``body``; raises WireError when the seal is wrong or the body is no JSON object."""
        if not same(header[4:], self._seals.received(body)):
            raise WireError("A frame does not carry the seal of this connection.")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise WireError("A frame holds no JSON.") from None
        if not isinstance(message, dict):
            raise WireError("A frame holds no JSON object.")
        return message
