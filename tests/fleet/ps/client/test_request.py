"""What a request says of its body and of its answer."""

from __future__ import annotations

import pytest

from fleet.ps.client.request import Request
from fleet.ps.wire.messages import MessageFlag, Op


def test_the_body_is_all_of_its_buffers() -> None:
    assert Request(Op.PUSH, [b"ab", memoryview(b"cde")]).body_bytes == 5
    assert Request(Op.PING).body_bytes == 0


@pytest.mark.parametrize(
    ("op", "flags", "asks"),
    [
        (Op.PULL, MessageFlag.NONE, True),
        (Op.WATCH, MessageFlag.NONE, True),
        (Op.PUSH, MessageFlag.VALUES, True),
        (Op.PUSH, MessageFlag.NONE, False),
    ],
)
def test_answers_with_rows_may_be_large(op: Op, flags: int, asks: bool) -> None:
    assert Request(op, flags=flags).asks_rows == asks
