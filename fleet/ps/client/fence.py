"""Fences: which of two servers a worker process may use, see [Note: Which of two servers]."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Fence:
    """What a worker process knows of one server and its standby.

    ``epoch`` is the highest that it has seen, 0 before the first answer. ``leader`` is the endpoint that last answered
    as the leader. ``bound`` is the epoch at which it asked the other one without getting an answer: that may
    have been promoted, so the leader's next epoch is not accepted.
    """

    epoch: int = 0
    leader: str = ""
    bound: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, epoch: int) -> bool:
        """Notes a higher epoch; returns False where it must not be accepted."""
        if self.bound is not None and epoch == self.bound + 1:
            return False
        self.epoch = max(self.epoch, epoch)
        return True


class Fences:
    """The fences of one worker process, by the number of the server; all its clients share them."""

    def __init__(self) -> None:
        self._fences: dict[int, Fence] = {}
        self._lock = threading.Lock()

    def of(self, index: int) -> Fence:
        """Returns the fence of server ``index``."""
        with self._lock:
            return self._fences.setdefault(index, Fence())
