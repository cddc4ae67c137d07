"""A thread of the library that ends by an error says so, and its owner's next call raises."""

from __future__ import annotations

import logging
import threading

import pytest

from fleet.common.own_thread import OwnThread
from fleet.errors import FleetError, PSError


def fail(error: BaseException) -> None:
    """Raises ``error``."""
    raise error


def test_what_returns_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    woken = threading.Event()
    thread = OwnThread(pow, 2, 5, name="fine", then=woken.set)
    assert thread.daemon
    thread.start()
    assert thread.result() == 32
    thread.check()
    assert not woken.is_set()
    assert caplog.text == ""


def test_an_end_by_an_error_is_said_and_raised(caplog: pytest.LogCaptureFixture) -> None:
    woken = threading.Event()
    thread = OwnThread(fail, RecursionError("too deep"), name="fleet-reader", then=woken.set)
    thread.start()
    thread.join()
    assert woken.is_set()
    sentence = "The thread 'fleet-reader' has ended, and nothing does its work any more: RecursionError: too deep"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("FLEET", logging.ERROR)
    assert record.getMessage().startswith(f"{sentence}\nTraceback")
    for _ in range(2):
        with pytest.raises(FleetError) as caught:
            thread.check()
        assert str(caught.value) == sentence
        assert isinstance(caught.value.__cause__, RecursionError)


def test_errors_of_fleet_are_raised_as_they_are() -> None:
    lines: list[str] = []
    thread = OwnThread(fail, PSError("the server is away."), name="sender 0", say=lines.append)
    thread.start()
    thread.join()
    with pytest.raises(PSError, match=r"^the server is away\.$"):
        thread.check()
    assert lines == [
        "The thread 'sender 0' has ended, and nothing does its work any more: PSError: the server is away."
    ]


def test_whoever_waits_for_a_thread_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    thread = OwnThread(fail, ValueError("x"), name="action", say=None)
    thread.start()
    with pytest.raises(ValueError, match="^x$"):
        thread.result()
    assert caplog.text == ""
