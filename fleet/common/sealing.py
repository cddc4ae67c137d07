"""Proof of a shared secret, and seals on the messages after it; the launcher and the parameter server use both.

Each end proves the secret over both nonces, and both derive from them a key for this connection only. A seal is
HMAC-SHA256 under that key over the direction, the message number and the content. So a relay of the handshake has
no key: it can forward the messages unchanged and in order, or end the connection.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

PROOF_BYTES = SEAL_BYTES = 32
_BLOCK_BYTES = 64

Buffer = bytes | bytearray | memoryview


def prove(secret: bytes, text: bytes) -> bytes:
    """Returns the proof for ``text`` that only a holder of ``secret`` can compute."""
    return hmac.digest(secret, text, "sha256")


def same(one: Buffer, other: Buffer) -> bool:
    """Returns whether two texts are equal; it takes the same time wherever they differ."""
    return hmac.compare_digest(one, other)


class MessageSeals:
    """Numbers and seals the messages that one end of a connection sends, and those that it receives.

    Args:
        key: used by this connection only.
        is_server: which end this is; a message in one direction is invalid in the other.
    """

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        # HMAC by its definition: copying the two states costs half of hmac.digest(), which matters for small messages.
        block = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))
        # The direction is sealed too, so that a relay cannot send a message back to its sender.
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
        state = self._inner.copy()
        outer = self._outer.copy()
        # Direction and number have fixed lengths, so no other split of the same bytes gives this text.
        state.update(b"".join((direction, number.to_bytes(8, "big"), *parts)))
        outer.update(state.digest())
        return outer.digest()
