"""Gate: many pushes at a time, or one copy that no push overlaps.

A push that is written to a log and then applied holds the gate ``shared`` around both; a snapshot holds it
``exclusive`` for each chunk it copies. Then the log number read inside ``exclusive`` separates exactly the pushes
that are in the chunk from those that are not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType


class Gate:
    """A shared/exclusive lock with turns: waiters of one side pass before the next holder of the other side.

    Without turns a snapshot, which takes the gate repeatedly, would keep all pushes out until it is done. Not
    re-entrant.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._sharing = self._exclusive_waiting = 0
        self._closed = False
        # Shared holders that wait for the end of the current turn, and those whose turn it is.
        self._blocked = self._owed = self._turn = 0
        self._shared = _SharedSide(self)

    def shared(self) -> AbstractContextManager[None]:
        """Holds the gate together with other ``shared`` holders."""
        return self._shared

    def _share(self) -> None:
        with self._changed:
            if self._closed or self._exclusive_waiting:
                self._wait_for_turn()
            self._sharing += 1

    def _share_no_longer(self) -> None:
        with self._changed:
            self._sharing -= 1
            if not self._sharing and self._exclusive_waiting:
                self._changed.notify_all()

    def _wait_for_turn(self) -> None:
        turn = self._turn
        self._blocked += 1
        try:
            self._changed.wait_for(lambda: self._turn != turn)
        finally:
            if self._turn != turn:
                self._owed -= 1
            else:
                self._blocked -= 1
            self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the gate alone."""
        with self._changed:
            self._exclusive_waiting += 1
            try:
                self._changed.wait_for(lambda: not (self._closed or self._sharing or self._owed))
                self._closed = True
            finally:
                self._exclusive_waiting -= 1
                if not self._closed:
                    self._end_turn()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._end_turn()

    def _end_turn(self) -> None:
        self._turn += 1
        self._owed += self._blocked
        self._blocked = 0
        self._changed.notify_all()


class _SharedSide(AbstractContextManager[None]):
    """One side of a gate; every push passes it, so it is no generator."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate._share()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate._share_no_longer()
