"""Positions of streams behind the parts of a push: round trips, and everything that is not one."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.ps.wire.messages import MessageError, TablePart, decode_parts, encode_parts
from fleet.ps.wire.positions import positions_tail, split_positions

RANGES = st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)).map(lambda ends: (min(ends), max(ends)))


@given(st.dictionaries(st.text(max_size=8), st.dictionaries(st.integers(0, 99).map(str), RANGES), max_size=3))
def test_they_come_back_and_the_parts_stay(positions):
    part = TablePart(3, 2, 1, np.array([5, 6]), np.ones((2, 1), np.float32))
    body = b"".join(map(bytes, [*encode_parts([part]), positions_tail(positions)]))
    parts, found = split_positions(body)
    assert found == positions
    assert len(body) % 8 == 0
    (same,) = decode_parts(parts, 1)
    assert same.ids.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends without them"),
        (b"1234", "ends without them"),
        (struct.pack("<Q", 1 << 50), "ends without them"),
        (struct.pack("<Q", 9), "ends without them"),
        (b"nonsense" + struct.pack("<Q", 8), "not JSON"),
        (b"[1,2,3] " + struct.pack("<Q", 8), "are {source"),
        (b'{"a": 1}' + struct.pack("<Q", 8), "are {source"),
        (positions_tail({"a": {"0": (4, 3)}}), "0 <= first <= next"),
        (positions_tail({"a": {"0": (-1, 3)}}), "0 <= first <= next"),
        (positions_tail({"a": {"0": (0, 1.5)}}), "0 <= first <= next"),  # type: ignore[dict-item]
        (positions_tail({"a": {"0": (0, 1 << 63)}}), "0 <= first <= next"),
    ],
)
def test_what_is_none_is_refused(body, words):
    with pytest.raises(MessageError, match=words):
        split_positions(body)
