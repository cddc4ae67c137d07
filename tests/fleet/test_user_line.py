"""The line of the user's program from which a call comes."""

from __future__ import annotations

from contextlib import contextmanager

from fleet._user_line import user_line


def test_names_the_caller() -> None:
    assert user_line().startswith(f"{__file__}:")


def test_looks_through_contexts() -> None:
    @contextmanager
    def opened():  # type: ignore[no-untyped-def]
        yield user_line()

    with opened() as found:
        assert found.startswith(f"{__file__}:")
