"""Alarm: one worker stops all others, even those that wait in a collective operation it will never join.

A thread of every worker looks into the job's store twice a second. A worker that rings leaves its message there; the
others print it and take it at their next :meth:`Alarm.taken`; a worker that has not done so ``GRACE_S`` seconds later
is blocked in an operation with the ringing worker, and ends with exit code 1.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fleet.common.own_thread import OwnThread

GRACE_S = 5.0
_PERIOD_S = 0.5
_HEARD_WITHIN_S = 3.0


class Alarm:
    """The alarm of one worker."""

    def __init__(self, global_rank: int, world_size: int) -> None:
        """Starts listening; every worker makes one, and later alarms are separate ones."""
        # A separate connection: the main thread may block on the store's usual one.
        store = _get_default_store().clone()  # type: ignore[attr-defined]
        number = store.add(f"fleet/alarms/{global_rank}", 1)
        self._store = dist.PrefixStore(f"fleet/alarm/{number}", store)
        self._rank = global_rank
        self._others = world_size - 1
        self._stopped = threading.Event()
        self._taken = threading.Event()
        self._message: str | None = None
        self._thread = OwnThread(self._listen, name="fleet-alarm")
        self._thread.start()

    def ring(self, message: str) -> None:
        """Tells the other workers, and waits at most three seconds until they have heard it."""
        # The own thread stops first, or it would hear this message.
        self._stopped.set()
        self._thread.join()
        deadline = time.monotonic() + _HEARD_WITHIN_S
        try:
            self._store.set("message", message)
            while self._store.add("heard", 0) < self._others and time.monotonic() < deadline:
                time.sleep(0.05)
        except RuntimeError:
            return  # the store's server is gone, and with it the job

    def taken(self) -> str | None:
        """Returns the message of a worker that rang, or ``None``; with a message this worker ends by itself."""
        self._thread.check()
        if self._message is not None:
            self._taken.set()
        return self._message

    def close(self) -> None:
        """Stops listening."""
        self._stopped.set()
        self._taken.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._stopped.wait(_PERIOD_S):
                if self._store.check(["message"]):
                    self._message = self._store.get("message").decode()
                    self._store.add("heard", 1)
                    break
        except RuntimeError:
            return  # the store's server ended before this worker
        if self._message is None:
            return
        print(f"[rank {self._rank}] stops: {self._message}", file=sys.stderr, flush=True)
        if not self._taken.wait(GRACE_S) and threading.main_thread().is_alive():
            os._exit(1)
