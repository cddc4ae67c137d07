"""OwnThread: the one kind of thread that the library starts; it logs the error that ends it and raises it to its owner.

A plain Python thread prints its error at most, and the program runs on without it: a table stops following its source,
a lease expires, and nobody is told. A thread that cannot affect training, such as a page or a log, has an owner that
never checks; its error is only logged. Pools of ``concurrent.futures`` store the error in the future and need none of
this.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any

from fleet.errors import FleetError

Say = Callable[[str], None]
_LOGGER = logging.getLogger("FLEET")


class OwnThread(threading.Thread):
    """A daemon thread, not started, that runs ``target(*args)``.

    Args:
        target: the work; it returns when nothing is left to do.
        name: the purpose of the thread, for messages.
        say: receives the sentence about the error that ended the thread; by default the FLEET logger, as an error.
            ``None``: the owner waits for the thread and gets the error from :meth:`result`.
        then: called in the thread after an error, to wake waiters whose event will never come.

    Attributes:
        failure: the error that ended the thread; ``None`` while it runs and after ``target`` returned.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *args: Any,
        name: str,
        say: Say | None = _LOGGER.error,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.failure: BaseException | None = None
        self._call = (target, args)
        self._say = say
        self._then = then
        self._value: Any = None

    def run(self) -> None:
        """Runs the target and stores its result or its error."""
        target, args = self._call
        # The owner may keep this object for hours; the arguments must not stay alive with it.
        del self._call
        try:
            self._value = target(*args)
        except BaseException as error:
            self.failure = error
            # Waiters wake before the log is written: writing may block.
            self._then()
            if self._say is not None:
                # A Fleet error explains itself; any other is a fault whose place only the traceback shows.
                lines = "" if isinstance(error, FleetError) else f"\n{traceback.format_exc().rstrip()}"
                self._say(self._sentence() + lines)

    def check(self) -> None:
        """Raises the error that ended the thread, if any: Fleet's errors unchanged, others inside a ``FleetError``."""
        if isinstance(self.failure, FleetError):
            raise self.failure
        if self.failure is not None:
            raise FleetError(self._sentence()) from self.failure

    def result(self) -> Any:
        """Waits for the end of the thread; returns the target's result or raises its error."""
        self.join()
        if self.failure is not None:
            raise self.failure
        return self._value

    def _sentence(self) -> str:
        kind = type(self.failure).__name__
        return f"The thread {self.name!r} has ended, and nothing does its work any more: {kind}: {self.failure}"
