"""One connection of a worker, as its server sees it, and the answers that go there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.ps.server.job_state import Worker
from fleet.ps.server.late_answers import LateAnswer
from fleet.ps.wire.memory_file import NotShared
from fleet.ps.wire.messages import Buffer, Header, MessageFlag, Status, asks_rows, places_of_rows
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.shared_bodies import SharedBodies


@dataclass(slots=True)
class Answer:
    """The status and body of an answer."""

    status: Status = Status.OK
    buffers: list[Buffer] = field(default_factory=list)
    n_tables: int = 0
    flags: int = MessageFlag.NONE
    step: int | None = None  # the step that the answer holds at least; by default the last one of sync mode

    @property
    def size(self) -> int:
        """The length of the body."""
        return sum(map(len, self.buffers))


class ConnectedWorker:
    """One connection of a worker, with the buffers it reuses."""

    def __init__(self, connection: Sealed) -> None:
        self.connection = connection
        self.worker: Worker | None = None
        self.channel = 0
        self.client_id = 0
        self.reads = ""  # the form in which rows go to a reader; empty: not one
        self.epoch = 0  # of what the reader reads
        self.late: LateAnswer | None = None  # of its last push that had to wait for a step
        self._body = memoryview(bytearray(1 << 16))
        self.in_memory = False  # the last body lies in memory that the worker shares
        self._rows = memoryview(bytearray(1 << 16))

    def body(self, size: int) -> memoryview:
        """Returns the place of the next body: ``size`` bytes; invalidates the previous view."""
        shared = self.connection.body_in_memory(size)
        self.in_memory = shared is not None
        if shared is not None:
            return shared
        if size > len(self._body):
            self._body = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        return self._body[:size]

    def kept_body(self, body: memoryview, flags: int) -> memoryview:
        """Returns the last body so that it stays valid until its step is applied.

        In memory it does where the answer waits for the step: until then the worker leaves it as it is.
        """
        if not self.in_memory:
            self._body = memoryview(b"")
            return body
        return body if flags & MessageFlag.VALUES else memoryview(np.frombuffer(body, np.uint8).copy())  # type: ignore[arg-type]

    def place_of(self, answer: Answer, header: Header) -> int:
        """Returns the flag of an answer that goes into memory: one with rows, see [Note: Memory of a connection]."""
        in_memory = asks_rows(header.op, header.flags) and self.connection.takes_in_memory(answer.size)
        return MessageFlag.IN_MEMORY if in_memory else MessageFlag.NONE

    def share(self, place: Any) -> bool | str:
        """Shares the memory that a worker offers; returns True, or the reason why not."""
        try:
            if not self.connection.is_here:
                raise NotShared("the server does not see that the worker is on its machine.")
            self.connection.share(SharedBodies.open(place if isinstance(place, dict) else {}))
        except NotShared as error:
            return str(error)
        return True

    def rows(self, shapes: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]]:
        """Returns an array for the rows of each part of an answer; invalidates the previous ones.

        In memory they lie where the body has them, so that nothing is copied.
        """
        starts, whole = places_of_rows([n * dim for n, dim in shapes])
        place = self.connection.place_in_memory(whole)
        if place is None:
            if whole > len(self._rows):
                self._rows = memoryview(np.empty(whole + whole // 4, np.uint8))  # type: ignore[arg-type]
            place = self._rows
        return [
            np.frombuffer(place, np.float32, n * dim, start).reshape(n, dim)
            for (n, dim), start in zip(shapes, starts, strict=True)
        ]
