"""Proof of a shared secret, and seals on what follows it; the launcher's wire and the parameter server's use both.

Each end proves the secret over the nonces of both, and both derive a key of this connection alone from the same. A
seal is HMAC-SHA256 under that key over the direction, the number of the message and its content. So one who relays
the handshake of two others has no key: it can pass their messages on unchanged and in order, or end the connection.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

__all__ = ["PROOF_BYTES", "SEAL_BYTES", "MessageSeals", "prove", "same"]

PROOF_BYTES = SEAL_BYTES = 32
_BLOCK_BYTES = 64

Buffer = bytes | bytearray | memoryview


def prove(secret: bytes, text: bytes) -> bytes:
    """Returns what only one who knows ``secret`` can compute for ``text``."""
    return hmac.digest(secret, text, "sha256")


def same(one: Buffer, other: Buffer) -> bool:
    """Compares in a time that tells nothing about where the two differ."""
    return hmac.compare_digest(one, other)


class MessageSeals:
    """Numbers and seals the messages that one end of a connection sends, and those that it receives.

    Args:
        key: of this connection alone.
        is_server: which end this is; a message does not pass for one of the other direction.
    """

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        # HMAC by its definition: copies of the two states cost half of hmac.digest(), which is felt by small messages.
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
        self._sends, self._receives = (b"s", b"c") if is_server else (b"c", b"s")
        self._num_sent = self._num_received = 0

    def sent(self, *parts: Buffer) -> bytes:
        """Returns the seal of the next message to send, made up of ``parts``."""
        self._num_sent += 1
        return self._seal(self._sends, self._num_sent, parts)

    def received(self, *parts: Buffer) -> bytes:
        """Returns the seal that the next message received must carry."""
        self._num_received += 1
        return self._seal(self._receives, self._num_received, parts)

    def _seal(self, direction: bytes, number: int, parts: Sequence[Buffer]) -> bytes:
        state, outer = self._inner.copy(), self._outer.copy()
        state.update(b"".join((direction, number.to_bytes(8, "big"), *parts)))
        outer.update(state.digest())
        return outer.digest()
