"""Which lines are the user's: those that are in no installed package and not in this project."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parent.parent
# Code of this project names its file as it was imported: an editable installation imports through symbolic links.
_OWN = tuple(f"{path}/" for path in (_PACKAGE, _PACKAGE.resolve(), (_PACKAGE.resolve() / "strategies").resolve()))


def user_site() -> str:
    """Returns file:line of the innermost frame that is in no installed package and not in this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library(file: str) -> bool:
    """Returns whether a file belongs to Python, an installed package or this project."""
    return (
        file.startswith((*_OWN, "<"))
        or "/site-packages/" in file
        or "/dist-packages/" in file
        or "/fleet/strategies/" in file
        or file.startswith((sys.prefix + "/", sys.base_prefix + "/lib/python"))
    )
