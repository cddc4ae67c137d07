"""Request: one message of a worker to a server, until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.errors import PSError
from fleet.ps.wire.messages import Buffer, Header, MessageFlag, Op, Status, asks_rows

OnAnswer = Callable[[Header, memoryview], None]


@dataclass(slots=True, eq=False)
class Request:
    """One request, until it is answered."""

    op: Op
    buffers: list[Buffer] = field(default_factory=list)
    n_tables: int = 0
    step: int = 0
    seq: int = 0
    flags: int = MessageFlag.NONE
    change: bool = False  # has its own number and is applied once
    on_answer: OnAnswer | None = None
    tag: int = 0
    done: bool = False
    status: Status = Status.OK
    error: PSError | None = None

    @property
    def body_bytes(self) -> int:
        """The length of the body."""
        return sum(map(len, self.buffers))

    @property
    def asks_rows(self) -> bool:
        """Whether the answer may be large."""
        return asks_rows(self.op, self.flags)
