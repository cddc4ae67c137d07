"""The MultiSlot text form: round trips, the two parsers against each other, errors that name file and line."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.dataset.kernels import parse_block
from fleet.dataset.samples import Samples
from fleet.dataset.slots import Slot
from fleet.dataset.text import TextForm, parse, parse_plain, write_text
from fleet.errors import ConfigError
from tests.fleet.dataset.test_samples import rows_of

FORM = TextForm((Slot("words", lod_level=1), Slot("prices", (-1, 2), "float32"), Slot("label")))
WITH_IDS = TextForm((Slot("words", lod_level=1),), parse_ins_id=True, parse_content=True)

ids = st.integers(-(2**63), 2**64 - 1)
floats = st.one_of(
    st.floats(width=32).map(str),
    st.floats(-1e6, 1e6).map(str),
    st.floats(-3e38, 3e38).map(repr),
    st.decimals(-1000, 1000, places=4).map(str),
    st.sampled_from(["0", "-0.0", "1.", ".5", "+3e-2", "1E5", "nan", "-inf", "Infinity", "16777217", "0.1e-50"]),
)


def wrapped(value: int) -> int:
    """Returns the 64 bits of a number as a signed one."""
    found: int = struct.unpack("<q", struct.pack("<Q", value % 2**64))[0]
    return found


def bits(samples: Samples) -> list[tuple[bytes, list[int]]]:
    """Returns every bit of the columns."""
    return [(column.values.tobytes(), column.offsets.tolist()) for column in samples.columns]


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[list[int]], list[list[str]], list[int], bytes]:
    """Returns values of FORM's three slots, and their text."""
    count = draw(st.integers(0, 5))
    words = [draw(st.lists(ids, min_size=1, max_size=4)) for _ in range(count)]
    prices = [draw(st.lists(floats, min_size=2, max_size=2)) for _ in range(count)]
    labels = [draw(ids) for _ in range(count)]
    space = draw(st.sampled_from([" ", "  ", "\t"]))
    end = draw(st.sampled_from(["\n", " \n", "\r\n"]))
    rows = [
        space.join([str(len(w)), *map(str, w), "2", *p, "1", str(label)]) + end
        for w, p, label in zip(words, prices, labels, strict=True)
    ]
    return words, prices, labels, "".join(rows).encode()


@settings(max_examples=80, deadline=None)
@given(lines())
def test_every_value_is_read_as_it_is_written(
    drawn: tuple[list[list[int]], list[list[str]], list[int], bytes],
) -> None:
    """B.7, text record: for each slot in order its count and its values."""
    words, prices, labels, text = drawn
    found = parse(text, FORM, "part-0")
    assert [row[0] for row in rows_of(found)] == [tuple(map(wrapped, row)) for row in words]
    assert [row[2] for row in rows_of(found)] == [(wrapped(label),) for label in labels]
    with np.errstate(all="ignore"):
        expected = np.array([float(price) for row in prices for price in row]).astype(np.float32)
    assert found.columns[1].values.tobytes() == expected.tobytes()
    assert bits(found) == bits(parse_plain(text, FORM, "part-0"))


@settings(max_examples=40, deadline=None)
@given(lines())
def test_written_text_reads_back(drawn: tuple[list[list[int]], list[list[str]], list[int], bytes]) -> None:
    first = parse(drawn[3], FORM, "part-0")
    again = parse(write_text(first, FORM), FORM, "part-0")
    for one, two in zip(first.columns, again.columns, strict=True):
        np.testing.assert_array_equal(one.values, two.values)
        assert one.offsets.tolist() == two.offsets.tolist()


def outcome(parser: object, data: bytes, form: TextForm) -> object:
    """Returns what a parser reads, or what it says."""
    try:
        return bits(parser(data, form, "part-0", 7))  # type: ignore[operator]
    except ConfigError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(
    lines(),
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(list(b"0123 -+.e\nxa\t\0\xff"))), min_size=1, max_size=4),
)
def test_both_parsers_agree_on_damaged_text(
    drawn: tuple[list[list[int]], list[list[str]], list[int], bytes], changes: list[tuple[int, int]]
) -> None:
    data = bytearray(drawn[3] or b"\n")
    for place, byte in changes:
        data[place % len(data)] = byte
    text = bytes(data)
    assert outcome(parse, text, FORM) == outcome(parse_plain, text, FORM)


def test_near_the_middle_of_two_floats_the_exact_value_decides() -> None:
    """16777217 is the middle of two float32; digits behind it decide, also beyond what a double holds."""
    middles = ["16777217", "16777217.0000000001", "16777216.999999999999", "0.1", "1.00000005960464477539"]
    middles += ["1.000000059604644775", "1.000000059604644776", "3.4028235e38", "1e-45", "7e-46", "1.17549435e-38"]
    middles += ["134.3651199340820377", "117.9195899963379026", "649.5465393066406425", "936.4407043457031421"]
    form = TextForm((Slot("x", lod_level=1, dtype="float32"),))
    text = f"{len(middles)} {' '.join(middles)}\n".encode()
    found = parse(text, form, "f").columns[0].values
    assert found.tobytes() == np.array([float(word) for word in middles]).astype(np.float32).tobytes()


def test_ids_and_contents_of_samples() -> None:
    """B.7: parse_ins_id, parse_content."""
    found = parse(b"1 user-7 1 ad=3;p=1 2 5 6\n1 user-8 1 x 1 9\n", WITH_IDS, "part-0")
    assert found.columns[0].texts() == ["user-7", "user-8"]
    assert found.columns[1].texts() == ["ad=3;p=1", "x"]
    assert found.columns[2].values.tolist() == [5, 6, 9]


def test_a_line_may_be_a_whole_batch() -> None:
    """B.7: input_type=1."""
    form = TextForm(FORM.slots, whole_batches=True)
    found = parse(b"3 1 2 3 4 0.5 1 1.5 2 2 0 1\n", form, "part-0")
    assert found.columns[1].values.tolist() == [0.5, 1, 1.5, 2]
    with pytest.raises(ConfigError, match="multiple of 2"):
        parse(b"1 1 3 0.5 1 1.5 1 0\n", form, "part-0")


BAD = [
    (b"", "the line ends where the number of its values should be"),
    (b"0 2 1 1 1 0", "it has 0 values.*pad it in the data generator"),
    (b"-1 2 1 1 1 0", "it has -1 values"),
    (b"two 7 8 2 1 1 1 0", "'two' is where the number of its values should"),
    (b"2 7", "2 values are announced and 1 follow"),
    (b"1 7 3 1 1 1 1 0", "'prices' .field 2 of 3.: it has 3 values. Its shape requires 2"),
    (b"1 7 2 1E", "2 values are announced and 1 follow"),
    (b"1 7.5 2 1 1 1 0", "'7.5' is not an integer.*float32"),
    (b"1 x 2 1 1 1 0", "'x' is not an integer"),
    (b"1 18446744073709551616 2 1 1 1 0", "does not fit in 64 bits"),
    (b"1 7 2 1 0x1p3 1 0", "'0x1p3' is not a number"),
    (b"1 7 2 1_0 1 1 0", "'1_0' is not a number"),
    (b"1 7 2 1e39 1 1 0", "'1e39' is too large for float32"),
    (b"1 7 2 1 1 1 0 5", "1 values more than its 3 fields, beginning with '5'"),
    (b"1 7 2 1 1", "slot 'label' .field 3 of 3.: the line ends"),
    (b"1 \xff\xfe 2 1 1 1 0", "is not an integer"),
]


@pytest.mark.parametrize(("line", "rule"), BAD)
def test_a_malformed_line_is_named(line: bytes, rule: str) -> None:
    """B.7, text record: an error says file, line, slot and rule; good lines stand before and behind."""
    good = b"1 7 2 0.5 1 1 0\n"
    for parser in (parse, parse_plain):
        with pytest.raises(ConfigError, match=f"part-3, line 12.*{rule}"):
            parser(good + good + line + b"\n" + good, FORM, "part-3", 10)


def test_many_values_that_python_reads() -> None:
    """More of them than the first room for them holds."""
    values = [2**64 - 1 - number for number in range(5000)]
    text = f"{len(values)} {' '.join(map(str, values))}\n".encode()
    found = parse(text, TextForm((Slot("x", lod_level=1),)), "f").columns[0].values
    assert found.tolist() == [wrapped(value) for value in values]
    assert parse_block.signatures, "the compiled parser was not used"


def test_the_plain_parser_reads_the_same() -> None:
    text = b"1 7 2 0.5 1 1 0\n2 8 9 2 2 3 1 1"
    compiled = bits(parse(text, FORM, "part-0"))
    assert bits(parse_plain(text + b"\n", FORM, "part-0")) == compiled
    assert len(parse(b"", FORM, "part-0")) == 0
