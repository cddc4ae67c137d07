"""FollowThread: takes up what is new in a source, again and again; a Reader and an index have one each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from fleet.common.own_thread import OwnThread
from fleet.errors import ConfigError, FleetError

LOOK_S = 0.2  # a brake is looked for at least as often


def check_interval(call: str, every_s: Any) -> None:
    """Raises :class:`ConfigError` unless ``every_s``, an argument of ``call``, is a number of seconds above 0."""
    number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
    if not number or not 0 < every_s < threading.TIMEOUT_MAX:
        raise ConfigError(f"{call}(every_s={every_s!r}) takes a number of seconds above 0.")


class FollowThread:
    """Calls ``refresh`` at intervals; an error of it is logged once, and the next round tries again.

    Args:
        refresh: takes up what is new.
        keeps: what stays after an error, as in ``fleet.ps.Reader('rows') keeps its rows``.
        name: the name of the thread.
        is_urgent: whether not to wait for the next interval; asked every 0.2 s, because of a brake.
        afterwards: what else each interval does.
    """

    def __init__(
        self,
        refresh: Callable[[], object],
        keeps: str,
        name: str,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
        afterwards: Callable[[], object] = lambda: None,
    ) -> None:
        self._refresh = refresh
        self._is_urgent = is_urgent
        self._afterwards = afterwards
        self._keeps = keeps
        self._name = name
        self._stop: threading.Event | None = None
        self._thread: OwnThread | None = None

    def start(self, every_s: float) -> None:
        """Begins to follow, every so many seconds; before that a thread from an earlier call ends."""
        self.stop()
        self._stop = threading.Event()
        self._thread = OwnThread(self._follow, every_s, self._stop, name=self._name)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if there is one."""
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._stop = self._thread = None

    def check(self) -> None:
        """Raises the error that ended the thread."""
        if self._thread is not None:
            self._thread.check()

    def _follow(self, every_s: float, stop: threading.Event) -> None:
        reported = ""
        due = time.monotonic() + every_s
        while not stop.wait(min(every_s, LOOK_S)):
            try:
                is_due = time.monotonic() >= due
                if is_due or self._is_urgent():
                    due = time.monotonic() + every_s if is_due else due
                    self._refresh()
                    reported = ""
                if is_due:
                    self._afterwards()
            except Exception as error:  # whatever the source holds, the next rows may be whole
                text = str(error) if isinstance(error, FleetError | OSError) else f"{type(error).__name__}: {error}"
                if text != reported:
                    reported = text
                    logging.getLogger("FLEET").warning("%s: %s", self._keeps, text)
