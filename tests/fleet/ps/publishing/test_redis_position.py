from __future__ import annotations

import json

import pytest

from fleet.ps.publishing.redis_position import read_position

GOOD = {"history": "00000001-a", "watermark": 7, "step": 3, "pushed_at": 1.5, "num_servers": 2, "values": "int8"}


def test_what_a_publisher_writes() -> None:
    assert read_position(json.dumps(GOOD).encode()) == GOOD


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("history", 7), ("history", None), ("watermark", -1), ("watermark", True), ("watermark", "7"), ("step", 1.5),
        ("pushed_at", "soon"), ("pushed_at", [1]), ("pushed_at", float("inf")), ("num_servers", 0),
        ("num_servers", 10**12), ("values", 3), ("watermark", 10**40),
    ],
)  # fmt: skip
def test_what_none_writes(name: str, value: object) -> None:
    """Issue 37, 5: each is told as such, whatever someone has put there."""
    with pytest.raises(ValueError, match="not a position"):
        read_position(json.dumps({**GOOD, name: value}).encode())


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"a":' * 50_000, b"[]", b"null"])
def test_what_is_no_object(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of json, or of this module
        read_position(text)
