"""The wire format: what is encoded comes back, and no damaged field gets through (PS design 3, reliability 5.1)."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.ps.wire.messages import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    Header,
    MessageError,
    Op,
    Status,
    TablePart,
    control_body,
    decode_control,
    decode_header,
    decode_parts,
    encode_header,
    encode_parts,
    join_parts,
    rows_of,
    tables_of,
)
from fleet.ps.wire.row_form import from_bfloat16, to_bfloat16

U64 = st.integers(0, 2**64 - 1)


def body_of(parts: list[TablePart], bfloat16: bool = False) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode_parts(parts, bfloat16))


def sparse_part(table_id: int = 3, n: int = 5, dim: int = 3) -> TablePart:
    return TablePart(
        table_id,
        n,
        dim,
        ids=np.arange(n, dtype=np.int64) - 2,
        rows=np.arange(n * dim, dtype=np.float32).reshape(n, dim),
        shows=np.ones(n, np.float32),
        clicks=np.zeros(n, np.float32),
        slots=np.arange(n, dtype=np.uint32),
    )


@given(
    st.sampled_from(Op),
    st.integers(0, 31).map(lambda bits: bits & ~2),
    U64,
    U64,
    U64,
    st.integers(0, 1024),
    st.sampled_from(Status),
    st.integers(0, MAX_BODY_BYTES),
    st.integers(0, 2**32 - 1),
)
def test_a_header_comes_back(op, flags, client_id, seq, step, tables, status, body, tag):
    header = Header(op, flags, client_id, seq, step, tables, status, body, tag)
    data = encode_header(header)
    assert len(data) == HEADER_BYTES == 44
    assert decode_header(data) == header


@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [
        (0, b"HTTP", "another protocol"),
        (4, b"\x09", "version 9"),
        (5, b"\xff", "operation 255"),
        (6, b"\x00\x80", "flags"),
        (32, b"\xff\xff", "65535 tables"),
        (34, b"\x63\x00", "status 99"),
        (36, b"\xff\xff\xff\xff", "4294967295 bytes"),
    ],
)
def test_each_wrong_field_of_a_header_is_named(offset, value, word):
    data = bytearray(encode_header(Header(Op.PULL)))
    data[offset : offset + len(value)] = value
    with pytest.raises(MessageError, match=word):
        decode_header(data)


def test_the_length_cap_is_the_callers():
    data = encode_header(Header(Op.PULL, body_bytes=1001))
    with pytest.raises(MessageError, match="at most 1000"):
        decode_header(data, max_body_bytes=1000)


def test_parts_of_many_tables_come_back():
    dense = TablePart(7, 5, 1, rows=np.arange(5, dtype=np.float32).reshape(5, 1), offset=1000)
    empty = TablePart(8, 0, 4, ids=np.empty(0, np.int64), rows=np.empty((0, 4), np.float32))
    only_ids = TablePart(9, 2, 4, ids=np.array([2**62, -1]))
    parts = [sparse_part(), dense, empty, only_ids]
    body = body_of(parts)
    assert len(body) % 8 == 0
    for sent, received in zip(parts, decode_parts(body, 4), strict=True):
        assert (sent.table_id, sent.n, sent.dim, sent.offset) == (
            received.table_id,
            received.n,
            received.dim,
            received.offset,
        )
        for name in ("ids", "rows", "shows", "clicks", "slots"):
            a, b = getattr(sent, name), getattr(received, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)


def test_received_arrays_are_views_of_the_body():
    body = bytearray(body_of([sparse_part()]))
    part = decode_parts(body, 1)[0]
    assert part.rows is not None
    before = part.rows.copy()
    body[-48:] = bytes(48)
    part2 = decode_parts(body, 1)[0]
    assert part.ids is not None
    assert np.shares_memory(part.ids, np.frombuffer(body, np.uint8))
    np.testing.assert_array_equal(before, part2.rows)


@pytest.mark.parametrize(
    ("head", "word"),
    [
        ((1 << 16, 1, 1, 0, 4, 0), "table id 65536"),
        ((1, 2**32 - 1, 1, 0, 4, 0), "do not fit"),
        ((1, 2**32 - 1, 3, 0, 65536, 0), "do not fit"),
        ((1, 1, 1, 0, 0, 0), "dim 0"),
        ((1, 1, 1, 0, 65537, 0), "dim 65537"),
        ((1, 1, 129, 0, 1, 0), "no meaning"),
        ((1, 1, 65, 0, 1, 0), "scales belong"),
        ((1, 1, 1, 7, 1, 0), "have 0 of them"),
        ((1, 1, 16, 7, 1, 0), "only a sparse part has"),
        ((1, 1, 17, 0, 1, 0), "either sparse"),
        ((1, 1, 2, 0, 1, 0), "either sparse"),
        ((1, 1, 16, 0, 4, 0), "dense part has dim 1"),
        ((1, 1, 20, 0, 1, 0), "no shows"),
        ((1, 1, 1, 0, 4, 8), "no offset"),
    ],
)
def test_each_wrong_field_of_a_part_is_named(head, word):
    body = struct.pack("<IIHHIQ", *head) + bytes(64)
    with pytest.raises(MessageError, match=word):
        decode_parts(body, 1)


def joined_part() -> TablePart:
    return join_parts([sparse_part(3), sparse_part(8, n=0), sparse_part(1, n=2)])


def test_a_part_of_several_tables_comes_back_as_it_was():
    sent = joined_part()
    (part,) = decode_parts(body_of([sent]), 1)
    assert part.table_ids == (3, 8, 1)
    assert part.table_id == 3
    for one, received in zip([sparse_part(3), sparse_part(8, n=0), sparse_part(1, n=2)], part.each(), strict=True):
        assert (one.table_id, one.n, one.dim) == (received.table_id, received.n, received.dim)
        for name in ("ids", "rows", "shows", "clicks", "slots"):
            np.testing.assert_array_equal(getattr(one, name), getattr(received, name))
    assert tables_of([part, sparse_part(9)]) == [3, 8, 1, 9]
    assert [one.table_id for one in rows_of([part, sparse_part(9)], {1, 9})] == [1, 9]
    assert rows_of([part], {1, 3, 8, 9}) == [part]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda body: body.__setitem__(slice(24, 28), (70_000).to_bytes(4, "little")), "up to 70000"),
        (lambda body: body.__setitem__(slice(28, 32), (6).to_bytes(4, "little")), "have 8"),
        (lambda body: body.__setitem__(slice(24, 28), (2).to_bytes(4, "little")), "begins with table 2"),
        (lambda body: body.__setitem__(slice(32, 36), (3).to_bytes(4, "little")), "occurs twice"),
        (lambda body: body.__setitem__(slice(10, 12), b"\xff\xff"), "members"),
        (lambda body: body.__setitem__(slice(8, 10), (16).to_bytes(2, "little")), "dense part"),
    ],
)
def test_each_wrong_member_of_a_part_is_named(change, word):
    body = bytearray(body_of([joined_part()]))
    change(body)
    with pytest.raises(MessageError, match=word):
        decode_parts(body, 1)


def test_parts_fill_the_body_exactly():
    body = body_of([sparse_part()])
    with pytest.raises(MessageError, match="fill"):
        decode_parts(body + bytes(8), 1)
    with pytest.raises(MessageError, match="do not fit"):
        decode_parts(body[:-8], 1)
    with pytest.raises(MessageError, match="inside the head"):
        decode_parts(body, 2)
    with pytest.raises(MessageError, match="occurs twice"):
        decode_parts(body + body, 2)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 8), st.booleans())
def test_random_bytes_are_refused_or_are_parts(data, tables, bfloat16):
    try:
        parts = decode_parts(data, tables, bfloat16)
    except MessageError:
        return
    assert len(parts) == tables
    assert len(body_of(parts, bfloat16)) == len(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_a_damaged_body_never_reads_outside_itself(position, noise):
    body = bytearray(body_of([joined_part(), TablePart(9, 4, 2, ids=np.arange(4))]))
    position %= len(body)
    body[position : position + len(noise)] = noise[: len(body) - position]
    try:
        parts = decode_parts(body, 2)
    except MessageError:
        return
    total = sum(a.nbytes for p in parts for a in (p.ids, p.rows, p.shows, p.clicks, p.slots) if a is not None)
    assert total <= len(body)


def test_encoding_refuses_arrays_of_another_kind():
    with pytest.raises(MessageError, match="float64"):
        encode_parts([TablePart(1, 2, 1, ids=np.arange(2), rows=np.zeros((2, 1)))])
    with pytest.raises(MessageError, match="contiguous"):
        encode_parts([TablePart(1, 2, 1, ids=np.arange(4)[::2])])
    with pytest.raises(MessageError, match="values of"):
        encode_parts([TablePart(1, 3, 1, ids=np.arange(2))])


def test_control_messages_are_capped_json():
    assert decode_control(control_body({"a": [1, "x"]})) == {"a": [1, "x"]}
    assert decode_control(b"") == {}
    with pytest.raises(MessageError, match="at most"):
        control_body({"a": "x" * MAX_CONTROL_BYTES})
    with pytest.raises(MessageError, match="at most"):
        decode_control(bytes(MAX_CONTROL_BYTES + 1))
    for body in (b"{", b"\xff\xfe", b"[1]", b"[" * 100_000):
        with pytest.raises(MessageError):
            decode_control(body)
    assert json.loads(control_body({})) == {}


def test_bfloat16_rounds_as_torch_does():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20_000).astype(np.float32) * np.exp2(rng.integers(-60, 60, 20_000)).astype(np.float32)
    values[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38]
    expected = torch.from_numpy(values).to(torch.bfloat16)
    halves = to_bfloat16(values)
    got = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got[1:], expected[1:])
    assert torch.isnan(got[0])
    back = from_bfloat16(halves)
    np.testing.assert_array_equal(back[1:], expected.float().numpy()[1:])
