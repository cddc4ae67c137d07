"""The bytes of an MSET command are those that the redis package makes."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.ps.publishing.redis_pairs import write_pairs
from tests.helpers.redis_server import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize("width", [1, 4, 10, 128, 1024])
@pytest.mark.parametrize("prefix", [b"fleet:shop:ads:", b"", b"f" * 300])
def test_words_are_those_of_the_package(width: int, prefix: bytes) -> None:
    from redis.connection import Encoder, PythonRespSerializer

    edges = [0, 1, -1, 9, 10, 99, 100, -10, 2**31, 10**18, 2**63 - 1, -(2**63), -(2**63) + 1]
    rng = np.random.default_rng(width)
    keys = np.concatenate([np.array(edges), rng.integers(-(2**63), 2**63 - 1, 500)])
    rows = rng.integers(0, 256, (len(keys), width), np.uint8)
    out = np.zeros(len(keys) * (len(prefix) + width + 64), np.uint8)
    size = write_pairs(np.frombuffer(prefix, np.uint8), keys, rows, out)
    pairs = zip(keys.tolist(), rows, strict=True)
    words = [word for key, row in pairs for word in (b"%b%d" % (prefix, key), bytes(row))]
    packer = PythonRespSerializer(6000, Encoder("utf-8", "strict", decode_responses=False).encode)
    expected = b"".join(packer.pack("MSET", *words))
    head = b"*%d\r\n$4\r\nMSET\r\n" % (1 + len(words))
    assert head + out[:size].tobytes() == expected
    assert not out[size:].any()
