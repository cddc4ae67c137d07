"""EXIT: the exit status of this process, as far as it is known while exit functions run.

Python keeps an error that nobody caught, ``sys.last_value``, and nothing of a SystemExit. So ``sys.exit`` is replaced
by a function that notes its argument first. ``raise SystemExit(3)`` and ``os._exit(3)`` go unnoticed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn


class ExitStatus:
    """Notes how this process ends.

    Example:
        >>> status = ExitStatus()
        >>> status.note(SystemExit(3))
        >>> status.code
        3
    """

    def __init__(self) -> None:
        self._noted = 0
        self._before: Callable[..., NoReturn] | None = None

    @property
    def code(self) -> int:
        """The status: 0, the argument of ``sys.exit``, or 1 for a text and for an error that nobody caught."""
        return self._noted or int(getattr(sys, "last_value", None) is not None)

    def watch(self) -> None:
        """Notes the argument of each ``sys.exit`` in the main thread from now on."""
        if self._before is None:
            self._before = sys.exit
            sys.exit = self._exit

    def unwatch(self) -> None:
        """Restores ``sys.exit``, unless someone else has replaced it since."""
        if self._before is not None and sys.exit == self._exit:
            sys.exit = self._before
            self._before = None

    def note(self, error: BaseException) -> None:
        """Notes that ``error`` ends this process."""
        self._noted = _code_of(error.code) if isinstance(error, SystemExit) else 1

    def goes_on(self) -> None:
        """Notes that the process does not end: somebody caught the SystemExit, and it is not on its way now."""
        if not isinstance(sys.exc_info()[1], SystemExit):
            self._noted = 0

    def _exit(self, status: Any = None, /) -> NoReturn:
        # In another thread sys.exit ends that thread alone.
        if threading.current_thread() is threading.main_thread():
            self._noted = _code_of(status)
        assert self._before is not None
        self._before(status)


def _code_of(status: object) -> int:
    if status is None or isinstance(status, int):
        return status or 0
    return 1


EXIT = ExitStatus()
