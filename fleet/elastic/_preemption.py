"""Lets the workers agree on the step at which all of them stop.

[Note: Agreement without a deadlock]
A worker that receives the request must not stop where it is: another one, a step ahead, would wait in a collective
forever. Nor can the workers use a collective to agree: it would pair up with the gradients of the one ahead. So they
use the store of the process group, which does not block:

1. A worker that has received it records this in the store and goes on training; from then on it checks the store
   after each step.
2. Once all have recorded it, worker 0 writes ``its step + 1`` as the step to stop at, before it begins that step.
3. Each worker stops after the first step, from that one on, in which the workers exchange something.

No worker has passed that step when it is written, because the step cannot finish without worker 0. And no worker
misses it: whoever finishes it has received worker 0's part of the exchange, which was sent after the write.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

# The request may have reached only other workers (through another node's launcher): it is checked this often.
_LISTEN_PERIOD_S = 0.5


class PreemptionStore(Protocol):
    """What the agreement needs from ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """Returns the value of a key."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are set."""


class Agreement:
    """One worker's part in agreeing on the last step; see [Note: Agreement without a deadlock].

    Args:
        store: the store of all workers; None for a single worker.
        rank: rank of this worker.
        world_size: number of workers.
    """

    def __init__(self, store: PreemptionStore | None, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._has_heard = False
        self._stop_at: int | None = None
        self._listened_at = 0.0
        self.is_reached = False

    def after_step(self, step: int, requested: bool, is_synchronised: Callable[[], bool]) -> bool:
        """Returns whether every worker stops after this ``step``.

        Args:
            step: steps that this worker has finished.
            requested: whether this worker was asked to stop.
            is_synchronised: whether the workers exchanged something in this step; called only when it matters.
        """
        if self.is_reached or not (self._has_heard or requested or self._others_asked()):
            return self.is_reached
        store = self._store
        if store is None:
            self._stop_at = step
        else:
            if not self._has_heard:
                store.set("asked", "1")
                store.set(f"heard/{self._rank}", "1")
            if self._stop_at is None:
                self._decide(store, step)
        self._has_heard = True
        self.is_reached = self._stop_at is not None and step >= self._stop_at and (store is None or is_synchronised())
        return self.is_reached

    def _decide(self, store: PreemptionStore, step: int) -> None:
        if self._rank == 0:
            if store.check([f"heard/{rank}" for rank in range(self._world_size)]):
                self._stop_at = step + 1
                store.set("stop_at", f"{self._stop_at}")
        elif store.check(["stop_at"]):
            self._stop_at = int(store.get("stop_at"))

    def _others_asked(self) -> bool:
        if self._store is None:
            return False
        now = time.monotonic()
        if now - self._listened_at < _LISTEN_PERIOD_S:
            return False
        self._listened_at = now
        return self._store.check(["asked"])


class TerminationNotice:
    """Takes SIGTERM as a request to stop, once; a second one ends the process.

    A data-loader process forked from the worker inherits the handler, and SIGTERM still ends it. A handler that the
    program has set stays.
    """

    def __init__(self) -> None:
        self.received = False
        self._pid = os.getpid()
        self._is_set = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._is_set = True

    def close(self) -> None:
        """Restores the signal's handler."""
        if self._is_set and signal.getsignal(signal.SIGTERM) == self._note:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received or os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = True
