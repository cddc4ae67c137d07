"""Request: one message of a worker to a server, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.errors import PSError
from fleet.ps.wire.messages import Buffer, Flag, Header, Op, Status

__all__ = ["Request"]

OnAnswer = Callable[[Header, memoryview], None]


@dataclass(slots=True, eq=False)
class Request:
    """One request, until it is answered."""

    op: Op
    buffers: list[Buffer] = field(default_factory=list)
    n_tables: int = 0
    step: int = 0
    seq: int = 0
    flags: int = Flag.NONE
    change: bool = False  # takes a number of its own and is applied once
    on_answer: OnAnswer | None = None
    tag: int = 0
    done: bool = False
    status: Status = Status.OK
    error: PSError | None = None

    @property
    def body_bytes(self) -> int:
        """The length of the body."""
        return sum(map(len, self.buffers))
