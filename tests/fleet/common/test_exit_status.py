"""What is known of how this process ends: errors that nobody caught, and what sys.exit was called with."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from fleet.common.exit_status import ExitStatus
from tests.helpers.sources import ROOT

_WATCHED = """
import atexit, sys
from fleet.common.exit_status import EXIT
EXIT.watch()
atexit.register(lambda: print(EXIT.code))
{body}
"""
_ENDS = {
    "pass": 0,
    "sys.exit()": 0,
    "sys.exit(0)": 0,
    "sys.exit(3)": 3,
    "sys.exit('no data')": 1,
    "try: 1 / 0\nexcept ZeroDivisionError: sys.exit(1)": 1,
    "1 / 0": 1,
    "try: sys.exit(3)\nfinally: EXIT.goes_on()": 3,
    "try: sys.exit(3)\nexcept SystemExit: pass\nEXIT.goes_on()": 0,
    "import threading; t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()": 0,
}


@pytest.fixture
def status() -> Iterator[ExitStatus]:
    """Watches sys.exit."""
    made = ExitStatus()
    made.watch()
    yield made
    made.unwatch()


@pytest.mark.parametrize("body", _ENDS)
def test_a_script_that_fails_is_known_to(body: str) -> None:
    code = _WATCHED.format(body=body)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (_ENDS[body], f"{_ENDS[body]}\n"), done.stderr


@pytest.mark.parametrize(("given", "code"), [((), 0), ((0,), 0), ((None,), 0), ((2,), 2), (("x",), 1)])
def test_it_notes_what_sys_exit_gets(status: ExitStatus, given: tuple[Any, ...], code: int) -> None:
    with pytest.raises(SystemExit) as caught:
        sys.exit(*given)
    assert (status.code, caught.value.code) == (code, given[0] if given else None)


def test_another_thread_ends_alone(status: ExitStatus) -> None:
    def leave() -> None:
        with suppress(SystemExit):
            sys.exit(3)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert status.code == 0


def test_sys_exit_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, status = sys.exit, ExitStatus()
    monkeypatch.setattr(sys, "exit", before)  # and it is put back after this test
    status.watch()
    status.watch()
    status.unwatch()
    assert sys.exit is before
    status.watch()
    monkeypatch.setattr(sys, "exit", print)  # a package that replaced it later keeps its own
    status.unwatch()
    assert sys.exit is print


def test_an_error_that_ends_a_process_of_spawn_is_noted() -> None:
    status = ExitStatus()
    status.note(SystemExit(0))
    assert status.code == 0
    status.note(ValueError("x"))
    assert status.code == 1
