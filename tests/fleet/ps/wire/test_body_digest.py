"""The digest of large bodies against its formula, however a body is cut into buffers."""

from __future__ import annotations

import hashlib
import random

import pytest

from fleet.ps.table.kernels.seal import LANES
from fleet.ps.wire.body_digest import JOINED_BYTES, BodyDigest

KEY = b"k" * 32


def formula(body: bytes) -> bytes:
    key = [*zip(*[iter(hashlib.shake_256(KEY).digest(8 * (LANES + 1)))] * 8, strict=True)]
    keys = [int.from_bytes(bytes(lane), "little") for lane in key]
    body += bytes(-len(body) % 8)
    found = b""
    for start in range(0, len(body), 8 * LANES):
        block = body[start : start + 8 * LANES]
        for shift in (0, 1):
            total = 0
            for lane in range(len(block) // 8):
                low, high = (int.from_bytes(block[8 * lane + at : 8 * lane + at + 4], "little") for at in (0, 4))
                own = keys[lane + shift]
                total += ((low + own) % 2**32) * ((high + (own >> 32)) % 2**32)
            found += (total % 2**64).to_bytes(8, "little")
    return found


@pytest.mark.parametrize("size", [1, 7, 8, 4095, 4096, 4097, 20_003, JOINED_BYTES, JOINED_BYTES + 1, 300_004])
def test_the_digest_is_that_of_the_formula_for_every_cut(size: int) -> None:
    rng = random.Random(size)
    body = rng.randbytes(size)
    expected = formula(body)
    digest = BodyDigest(KEY)
    digest([rng.randbytes(size)], size)  # nothing of the body before is left
    for _ in range(5):
        cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.choice([0, 3, 20])))})
        parts = [bytearray(body[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert digest(parts, size) == expected


def test_each_bit_and_each_place_counts() -> None:
    body = random.Random(0).randbytes(12_288)
    digest = BodyDigest(KEY)
    digests = {bytes(digest([body], len(body))), bytes(BodyDigest(b"other")([body], len(body)))}
    for at in range(0, len(body), 97):
        changed = bytearray(body)
        changed[at] ^= 1 << at % 8
        digests.add(bytes(digest([changed], len(body))))
    digests.add(bytes(digest([body[4096:8192] + body[:4096] + body[8192:]], len(body))))
    digests.add(bytes(digest([body[8:16] + body[:8] + body[16:]], len(body))))
    assert len(digests) == 4 + len(range(0, len(body), 97))
