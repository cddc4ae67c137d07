"""Gate: many pushes at a time, or one copier that no push overlaps.

A push that is written to a log and then applied holds the gate ``shared`` around both; a snapshot holds it
``exclusive`` for each chunk it copies. Then the log number read inside ``exclusive`` separates exactly the pushes
that are in the chunk from those that are not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A shared/exclusive lock; a waiting exclusive holder goes before new shared ones. Not re-entrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._sharing = 0
        self._waiting = 0
        self._closed = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the gate together with other ``shared`` holders."""
        with self._changed:
            while self._closed or self._waiting:
                self._changed.wait()
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                if not self._sharing:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the gate alone."""
        with self._changed:
            self._waiting += 1
            while self._closed or self._sharing:
                self._changed.wait()
            self._waiting -= 1
            self._closed = True
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
