"""BodyDigest: a keyed digest of a large message body, at the speed of memory.

HMAC-SHA256 over rows would take longer than pulling and pushing them. So a body is first hashed as in UMAC (RFC 4418):
by NH, a universal hash under a secret key that is used for nothing else; HMAC covers the result. For each block of
4 KB, NH is the sum, modulo 2^64, of ``(low + key_low) * (high + key_high)`` over its lanes of 8 bytes, with the sums in
brackets modulo 2^32, and once more with the key one lane on. Two bodies of equal length have the same digest for at
most one in 2^64 of the keys. A connection ends with the first wrong seal, so there is one attempt per key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.ps.table.kernels.numba_cache import load_kernels
from fleet.ps.wire.messages import Buffer

JOINED_BYTES = 1 << 16  # up to here joining the buffers is cheaper than taking the address of each


class BodyDigest:
    """The digests of one connection's bodies, under a key derived from ``secret``; one thread at a time."""

    def __init__(self, secret: bytes) -> None:
        kernel = load_kernels("seal")
        self._add_lanes = kernel.add_lanes
        self._block_bytes = 8 * kernel.LANES
        self._key = np.frombuffer(hashlib.shake_256(secret).digest(self._block_bytes + 8), np.uint64)
        self._joined = np.empty(JOINED_BYTES, np.uint8)
        self._view = memoryview(self._joined)  # type: ignore[arg-type]
        self._key_at = _address(self._key)
        self._joined_at = _address(self._joined)
        self._make_room(JOINED_BYTES)

    def __call__(self, buffers: Sequence[Buffer], size: int) -> memoryview:
        """Returns the digest of the body of ``size`` bytes that ``buffers`` make up, valid until the next one."""
        blocks = -(-size // self._block_bytes)
        if 2 * blocks > len(self._sums):
            self._make_room(size + size // 4)
        if size <= JOINED_BYTES:
            self._add_joined(buffers)
        else:
            self._add_each(buffers)
        return self._digest[: 16 * blocks]

    def _make_room(self, size: int) -> None:
        self._sums = np.empty(2 * (-(-size // self._block_bytes)), np.uint64)
        self._sums_at = _address(self._sums)
        self._digest = memoryview(self._sums).cast("B")  # type: ignore[arg-type]

    def _add_joined(self, buffers: Sequence[Buffer]) -> None:
        end = 0
        for buffer in buffers:
            begin = end
            end = end + len(buffer)
            self._view[begin:end] = buffer
        if end % 8:
            self._joined[end : end + 8 - end % 8] = 0
        self._add_lanes(self._joined_at, -(-end // 8), 0, self._key_at, self._sums_at)

    def _add_each(self, buffers: Sequence[Buffer]) -> None:
        first = 0
        rest = b""
        for buffer in buffers:
            if rest:  # an odd end of rows, and the padding after it
                buffer = rest + bytes(buffer)
            count = len(buffer) // 8
            self._add(buffer, count, first)
            first = first + count
            rest = bytes(buffer[8 * count :])
        if rest:
            self._add(rest.ljust(8, b"\0"), 1, first)

    def _add(self, buffer: Buffer, count: int, first: int) -> None:
        if count:
            data = np.frombuffer(buffer, np.uint8)
            self._add_lanes(_address(data), count, first, self._key_at, self._sums_at)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
