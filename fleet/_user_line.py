"""Where in the user's program a call of this package comes from."""

from __future__ import annotations

import sys

_INNER = ("fleet", "torch", "contextlib", "functools")


def user_line() -> str:
    """Returns ``FILE:LINE`` of the innermost caller that belongs neither to this package nor to torch or Python."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INNER:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
