"""Notes on exceptions, also on Python 3.10, whose exceptions have no ``add_note``."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Adds ``note`` to the ``__notes__`` of ``error``; Python 3.11 and newer print them below its traceback."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined,unused-ignore]
