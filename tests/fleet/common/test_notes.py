"""Notes on exceptions are kept on every Python."""

from __future__ import annotations

from fleet.common.notes import add_note


class Bare(BaseException):
    """An exception as Python 3.10 has them."""

    add_note = property()


def test_notes_are_kept_in_order() -> None:
    for error in (ValueError("no"), Bare()):
        add_note(error, "first")
        add_note(error, "second")
        assert error.__notes__ == ["first", "second"]
