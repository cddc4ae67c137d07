"""The few numbers that a worker and its launcher share: a file of one page that both map into memory.

The worker writes the step it has finished and when; the launcher writes that it wants the job to stop. Each number is
an aligned 8-byte word with one writer, so neither side waits, and a step costs the worker less than a microsecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from pathlib import Path

from fleet.common.plain_files import open_own

# Exit code of workers and launcher when a job that was asked to stop has saved itself: EX_TEMPFAIL, try again later.
PREEMPTED = 75
# The signal that makes a worker write its stacks; programs and schedulers use SIGUSR1 and SIGUSR2 themselves.
STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2 - 9) + 9
STACK_SUFFIX = ".stacks"
NUM_BYTES = 4096
_MAGIC = 0x666C656574_0001  # "fleet", version 1

MAGIC, PID, MAIN_THREAD, STEP, BEAT_NS, PAUSED, OWN_NS, OWN_STEPS, STOP_ASKED, SHOWS_STACKS, TAKES_TIMES = range(11)
NUM_WORDS = TAKES_TIMES + 1


class WorkerFile:
    """One mapped file; ``words`` are its numbers by the names of this module (``words[STEP]``)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_own(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, NUM_BYTES)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("q")
        if self.words[MAGIC] != _MAGIC:
            self.close()
            raise OSError(f"{path} is not a worker's file of this version")

    @classmethod
    def create(cls, path: Path) -> WorkerFile:
        """Makes a new file, readable and writable by its owner alone, and maps it."""
        path.unlink(missing_ok=True)
        path.with_name(path.name + STACK_SUFFIX).unlink(missing_ok=True)
        descriptor = open_own(path, os.O_RDWR | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, _MAGIC.to_bytes(8, "little").ljust(NUM_BYTES, b"\0"))
        finally:
            os.close(descriptor)
        return cls(path)

    def begin(self, main_thread: int) -> None:
        """Notes, in the worker, that it has begun."""
        self.words[MAIN_THREAD] = main_thread
        self.words[BEAT_NS] = time.monotonic_ns()
        self.words[PID] = os.getpid()

    @property
    def stacks(self) -> Path:
        """The file that the worker writes its stacks to."""
        return self.path.with_name(self.path.name + STACK_SUFFIX)

    def close(self) -> None:
        """Lets go of the memory; the file stays."""
        with contextlib.suppress(ValueError):
            self.words.release()
        with contextlib.suppress(BufferError, ValueError):
            self._map.close()
