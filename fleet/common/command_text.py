"""Texts of the commands: the name that was typed, and descriptions for a terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["plain_text", "typed"]


def typed(command: str = "") -> str:
    """Returns how a command of ``python -m fleet`` was called: as the module, or as the installed ``fleet``.

    Example:
        >>> typed("verify")
        'python -m fleet verify'
    """
    begin = "fleet" if Path(sys.argv[0]).name == "fleet" else "python -m fleet"
    return f"{begin} {command}".rstrip()


def plain_text(docstring: str | None) -> str:
    """Returns a module's docstring as one paragraph without markup, and without the command that it begins with.

    Example:
        >>> plain_text("``python -m fleet env``: one screen, to paste into a bug report.")
        'One screen, to paste into a bug report.'
    """
    text = " ".join((docstring or "").split())
    text = re.sub(r"^``[^`]*``: ", "", text).replace("``", "")
    return text[:1].upper() + text[1:]
