"""Protobuf text format: parses text into a tree of entries and formats it again, without a schema.

A message is a list of entries ``name: value`` or ``name { ... }``. Values are strings (single or double quoted, with
escapes, adjacent ones joined), numbers (decimal, hexadecimal, octal, with an ``f`` at the end, ``inf``, ``nan``),
bare words (``true``, names of enums) and ``[lists]``. ``#`` starts a comment; ``,`` and ``;`` may end an entry.
The grammar follows protobuf.dev, "Text Format Language Specification", without extensions and ``Any``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError


class Word(str):
    """A bare word: ``true``, ``false``, ``inf`` or the name of an enum."""

    __slots__ = ()


@dataclass(frozen=True)
class TextEntry:
    """One ``name: value``; a message value is a tuple of entries, a list value a list."""

    name: str
    value: Any
    line: int


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>-?\s*(?:0[xX][0-9a-fA-F]+|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?[fF]?)(?![\w.]))
      | (?P<word>-?[A-Za-z_][A-Za-z0-9_]*)
      | (?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def parse(text: str, source: str) -> tuple[TextEntry, ...]:
    """Returns the entries of ``text``.

    Raises:
        ConfigError: the text is not in text format; names ``source`` and the line.

    Example:
        >>> parse('amp: true amp_configs { custom_white_list: "a" }', "example")[0]
        TextEntry(name='amp', value='true', line=1)
    """
    parser = _TextParser(list(_tokens(text, source)), source)
    entries = parser.message(end=None)
    return tuple(entries)


def _tokens(text: str, source: str) -> Iterator[_Token]:
    line = 1
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ConfigError(f"{source}, line {line}: {text[place : place + 20].splitlines()[0]!r} is no text format.")
        kind = str(match.lastgroup)
        found = match.group()
        if kind == "newline":
            line += 1
        elif kind != "space":
            yield _Token(kind, found, line)
            line += found.count("\n")
        place = match.end()


class _TextParser:
    """Reads entries from a list of tokens."""

    def __init__(self, tokens: list[_Token], source: str) -> None:
        self._tokens = tokens
        self._source = source
        self._place = 0

    def message(self, end: str | None, opened: int = 0, depth: int = 0) -> list[TextEntry]:
        """Returns the entries up to the mark ``end``, or to the end of the text."""
        # Well before Python's recursion limit.
        if depth > 50:
            raise self._error(opened, "blocks are nested more than 50 deep")
        entries: list[TextEntry] = []
        while True:
            token = self._next()
            if token is None:
                if end is None:
                    return entries
                raise self._error(opened, f"this block is not closed; write {end!r} after its last entry")
            if token.kind == "mark" and token.text == end:
                return entries
            if token.kind != "word" or token.text.startswith("-"):
                raise self._error(token.line, f"expected the name of an option, got {token.text!r}")
            entries.append(self._entry(token, depth))
            self._skip(",;")

    def _entry(self, name: _Token, depth: int) -> TextEntry:
        colon = self._skip(":")
        if self._peek("{<["):
            return TextEntry(name.text, self._bracketed(depth), name.line)
        if not colon:
            raise self._error(name.line, f"{name.text!r} is followed by neither ':' nor '{{'")
        return TextEntry(name.text, self._scalar(name), name.line)

    def _bracketed(self, depth: int) -> Any:
        opening = self._tokens[self._place]
        self._place += 1
        if opening.text != "[":
            return tuple(self.message("}" if opening.text == "{" else ">", opening.line, depth + 1))
        items: list[Any] = []
        while not self._skip("]"):
            if items and not self._skip(","):
                raise self._error(opening.line, "the items of a list are separated by ',' and closed by ']'")
            if depth > 50:
                raise self._error(opening.line, "lists are nested more than 50 deep")
            items.append(self._bracketed(depth + 1) if self._peek("{<[") else self._scalar(opening))
        return items

    def _scalar(self, before: _Token) -> Any:
        token = self._next()
        if token is None or token.kind == "mark":
            raise self._error(before.line, f"{before.text!r} has no value")
        if token.kind == "string":
            return self._string(token)
        if token.kind == "word":
            return Word(token.text)
        value = _number(token.text)
        if value is None:
            raise self._error(token.line, f"the number {token.text[:40]} does not fit 64 bits")
        return value

    def _string(self, first: _Token) -> str:
        texts = [first.text[1:-1]]
        while self._place < len(self._tokens) and self._tokens[self._place].kind == "string":
            texts.append(self._tokens[self._place].text[1:-1])
            self._place += 1
        try:
            return b"".join(_unescaped(text) for text in texts).decode("utf-8")
        except (ValueError, OverflowError):  # also for a code that is not a character
            raise self._error(first.line, f"the string {first.text:.80} is not UTF-8") from None

    def _next(self) -> _Token | None:
        if self._place == len(self._tokens):
            return None
        self._place += 1
        return self._tokens[self._place - 1]

    def _peek(self, marks: str) -> bool:
        token = self._tokens[self._place] if self._place < len(self._tokens) else None
        return token is not None and token.kind == "mark" and token.text in marks

    def _skip(self, marks: str) -> bool:
        found = self._peek(marks)
        self._place += found
        return found

    def _error(self, line: int, rule: str) -> ConfigError:
        return ConfigError(f"{self._source}, line {line}: {rule}.")


def _number(text: str) -> int | float | None:
    """Returns the number, or ``None`` for an integer of more than 64 bits."""
    digits = "".join(text.split())
    bare = digits.lstrip("-")
    is_hex = bare[:2] in ("0x", "0X")
    if not is_hex and not bare.isdigit():
        return float(digits.rstrip("fF"))
    # int() of a long text takes time quadratic in its digits.
    if len(bare) > 100:
        return None
    octal = len(bare) > 1 and bare[0] == "0" and not set(bare) & set("89")
    value = int(digits, 16 if is_hex else 8 if octal else 10)
    return value if -(2**63) <= value < 2**64 else None


def _unescaped(text: str) -> bytes:
    data = bytearray()
    place = 0
    for match in _ESCAPE.finditer(text):
        octal, byte, short, long, letter = match.groups()
        data += text[place : match.start()].encode()
        if octal or byte:
            # Escapes give bytes, not characters: several of them can make up one UTF-8 character.
            data += bytes([int(octal, 8) & 255 if octal else int(byte, 16)])
        elif short or long:
            data += chr(int(short or long, 16)).encode()
        else:
            data += _ESCAPES.get(letter, letter).encode()
        place = match.end()
    return bytes(data) + text[place:].encode()


def quoted(text: str) -> str:
    """Returns ``text`` as a string of the text format, ASCII only."""
    codes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(codes.get(letter) or _as_ascii(letter) for letter in text) + '"'


def _as_ascii(letter: str) -> str:
    return letter if " " <= letter <= "~" else "".join(f"\\{byte:03o}" for byte in letter.encode())


def format_entries(entries: Iterable[TextEntry], indent: str = "") -> str:
    """Returns ``entries`` as text, one per line; the inverse of :func:`parse`."""
    lines = []
    for entry in entries:
        if isinstance(entry.value, tuple):
            lines.append(f"{indent}{entry.name} {{\n{format_entries(entry.value, indent + '  ')}{indent}}}\n")
        else:
            lines.append(f"{indent}{entry.name}: {_format_value(entry.value)}\n")
    return "".join(lines)


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    if isinstance(value, tuple):
        return "{ " + " ".join(format_entries(value).split("\n")).strip() + " }"
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return quoted(value) if isinstance(value, str) else repr(value)
