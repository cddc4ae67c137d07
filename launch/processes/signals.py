"""Signals to the launcher, turned into something a selector can wait for.

The handlers do nothing; Python writes the number of each signal into a pipe, so that no signal is lost between a check
and a wait. A signal that was ignored when the launcher started (``nohup``) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _note(number: int, frame: FrameType | None) -> None:
    """Does nothing: the wake-up descriptor carries the number."""


class HasFileno(Protocol):
    """An object that a selector can wait for."""

    def fileno(self) -> int:
        """Returns the descriptor."""


class Wakeup:
    """A pipe through which threads wake the main thread; ``fileno`` is readable when there may be something to do."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    def fileno(self) -> int:
        """Returns the descriptor to wait on."""
        return self._read_fd

    def drain(self) -> None:
        """Makes ``fileno`` unreadable until the next news."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_fd, 4096):
                pass

    def notify(self) -> None:
        """Makes ``fileno`` readable."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write_fd, b"!")

    def close_pipe(self) -> None:
        """Closes the pipe; no thread may use it any more."""
        os.close(self._read_fd)
        os.close(self._write_fd)


class SignalInbox(Wakeup):
    """Collects SIGTERM, SIGINT and SIGHUP while it is open; ``fileno`` becomes readable when one has come.

    Outside the main thread nothing is installed, as Python allows handlers only there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self.received: list[int] = []

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, _note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(self._wakeup_before)
        self.close_pipe()

    def wait(self, timeout_s: float, *others: HasFileno) -> None:
        """Returns when a signal has come, one of ``others`` is readable, or the time is over; opens no descriptor."""
        waiting = select.poll()
        for one in (self, *others):
            waiting.register(one.fileno(), select.POLLIN)
        waiting.poll(timeout_s * 1000)

    def take(self) -> list[int]:
        """Returns the stop signals that came since the last call, in order, and remembers them in ``received``."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self._read_fd, 64):
                numbers += [number for number in block if number in STOP_SIGNALS]
        self.received += numbers
        return numbers
