"""Protobuf text format: grammar, escapes and errors with line numbers (A0.11)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigError
from fleet.options.prototxt import TextEntry, Word, format_entries, parse, quoted


def values(text: str) -> list[tuple[str, object]]:
    return [(entry.name, entry.value) for entry in parse(text, "f")]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1", 1),
        ("a: -7", -7),
        ("a: - 7", -7),
        ("a: 0x1F", 31),
        ("a: 010", 8),
        ("a: 0", 0),
        ("a: 1.5", 1.5),
        ("a: 1.5f", 1.5),
        ("a: 2F", 2.0),
        ("a: .5", 0.5),
        ("a: 3.", 3.0),
        ("a: 1e-3", 0.001),
        ("a: true", Word("true")),
        ("a: SOME_ENUM", Word("SOME_ENUM")),
        ("a: -inf", Word("-inf")),
        ("a: 'x'", "x"),
        ('a: "x" "y"\n  \'z\'', "xyz"),
        (r'a: "\n\t\"\'\\"', "\n\t\"'\\"),
        (r'a: "\101\x42"', "AB"),
        (r'a: "\344\270\255"', "\u4e2d"),
        (r'a: "\u4e2d\U0001F600"', "\u4e2d\U0001f600"),
        ('a: "# no comment"', "# no comment"),
        ("a: [1, 2]", [1, 2]),
        ("a: []", []),
        ("a: ['x', [1]]", ["x", [1]]),
    ],
)
def test_scalars(text: str, value: object) -> None:
    """Each form of a value."""
    found = values(text)
    assert found == [("a", value)]
    assert type(found[0][1]) is type(value)


def test_blocks_comments_and_separators() -> None:
    """Blocks with braces or angle brackets, with or without colon; comments; ',' and ';' between entries."""
    text = "# head\nb { c: 1, d: 2; } # tail\nb: <\n  c: 3\n>\ne { }"
    assert parse(text, "f") == (
        TextEntry("b", (TextEntry("c", 1, 2), TextEntry("d", 2, 2)), 2),
        TextEntry("b", (TextEntry("c", 3, 4),), 3),
        TextEntry("e", (), 6),
    )


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("a: 1\nb 2", 2, "neither ':' nor '{'"),
        ("a: 1\n\nb {\n c: 1\n", 3, "not closed"),
        ("a: 1 }", 1, "expected the name of an option, got '}'"),
        ("a:", 1, "'a' has no value"),
        ("a: ,", 1, "'a' has no value"),
        ('a: "x\n"', 1, "no text format"),
        ("\n\na: $", 3, "no text format"),
        ("a: [1 2]", 1, "separated by ','"),
        ("a: [1,", 1, "no value|closed by"),
        ("1: 2", 1, "expected the name of an option, got '1'"),
        (r'a: "\377"', 1, "not UTF-8"),
        ("a {" * 60, 1, "50 deep"),
        ("a: " + "[" * 60, 1, "50 deep"),
        ("a { b: 1 >", 1, "expected the name of an option, got '>'"),
    ],
)
def test_errors_name_the_line(text: str, line: int, rule: str) -> None:
    """What is wrong, and where."""
    with pytest.raises(ConfigError, match=rf"^job.prototxt, line {line}: .*({rule})"):
        parse(text, "job.prototxt")


@given(st.text())
def test_strings_round_trip(text: str) -> None:
    """Any text survives, and the file is ASCII."""
    assert quoted(text).isascii()
    assert parse(f"a: {quoted(text)}", "f")[0].value == text


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but ConfigError comes out of a wrong file."""
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text, "f"), tuple)


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=9),
    st.sampled_from([Word("true"), Word("ENUM")]),
)  # fmt: skip
ENTRIES = st.recursive(
    st.lists(st.builds(TextEntry, NAMES, SCALARS, st.just(0)), max_size=3),
    lambda inner: st.lists(
        st.builds(TextEntry, NAMES, st.one_of(SCALARS, inner.map(tuple), st.lists(SCALARS, max_size=3)), st.just(0)),
        max_size=3,
    ),
    max_leaves=12,
)


def without_lines(entries: object) -> object:
    if isinstance(entries, TextEntry):
        return (entries.name, without_lines(entries.value))
    if isinstance(entries, list | tuple):
        return type(entries)(without_lines(item) for item in entries)
    return entries


@given(ENTRIES)
def test_trees_round_trip(entries: list[TextEntry]) -> None:
    """What is written is what is read."""
    assert without_lines(parse(format_entries(entries), "f")) == without_lines(tuple(entries))
