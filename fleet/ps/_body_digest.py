"""BodyDigest: a keyed digest of a large message body, at the speed of memory.

HMAC-SHA256 over rows would take longer than pulling and pushing them. So a body is hashed as in UMAC (RFC 4418) first:
by NH, a universal hash under a secret key that is used for nothing else, and HMAC covers the result. For each block of
4 KB NH is the sum, modulo 2^64, of ``(low + key_low) * (high + key_high)`` over its lanes of 8 bytes, the sums in
brackets modulo 2^32; once more with the key one lane on. Whatever the bodies, two of equal length have the same digest
for at most one in 2^64 of the keys; a connection ends with the first wrong seal, so there is one attempt for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.ps._kernels_seal import LANES, add_lanes
from fleet.ps._messages import Buffer

__all__ = ["BodyDigest"]


class BodyDigest:
    """The digests of one connection's bodies, under a key derived from ``secret``."""

    def __init__(self, secret: bytes) -> None:
        self._key = np.frombuffer(hashlib.shake_256(secret).digest(8 * (LANES + 1)), np.uint64)

    def __call__(self, buffers: Sequence[Buffer], size: int) -> bytes:
        """Returns the digest of the body of ``size`` bytes that ``buffers`` make up."""
        sums = np.zeros(2 * (-(-size // (8 * LANES))), np.uint64)
        first, rest = 0, b""
        for buffer in buffers:
            if rest:  # an odd end of rows, and the padding behind it
                buffer = rest + bytes(buffer)
            count = len(buffer) // 8
            self._add(buffer, count, first, sums)
            first, rest = first + count, bytes(buffer[8 * count :])
        if rest:
            self._add(rest.ljust(8, b"\0"), 1, first, sums)
        return sums.tobytes()

    def _add(self, buffer: Buffer, count: int, first: int, sums: NDArray[np.uint64]) -> None:
        if count:
            add_lanes(_address(np.frombuffer(buffer, np.uint8)), count, first, _address(self._key), _address(sums))


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
