"""The command that runs before each start of the workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from fleet.launch.job import run_hook
from fleet.launch.membership.generation import StoppedBySignalError
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox


class Hook:
    """Runs a Python line as the hook and keeps what the launcher logged."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], signals: SignalInbox) -> None:
        self._folder, self._capsys, self._signals = folder, capsys, signals

    def __call__(self, line: str) -> str:
        run_hook((sys.executable, "-c", line), dict(os.environ), LaunchLog(), self._signals)
        return self._capsys.readouterr().err


@pytest.fixture
def hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Hook]:
    with SignalInbox() as signals:
        yield Hook(tmp_path, capsys, signals)


def test_hook_runs_to_its_end_and_its_words_are_logged(hook: Hook) -> None:
    assert "elastic_pre_hook: hello" in hook("print('hello')")
    with pytest.raises(LaunchError, match="ended with code 3; the workers were not started") as caught:
        hook("raise SystemExit(3)")
    assert caught.value.exit_code == 3


def test_signal_ends_a_hook_that_hangs(hook: Hook) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(StoppedBySignalError):
        hook("import time; time.sleep(30)")
    timer.join()


def test_hook_that_does_not_exist() -> None:
    with SignalInbox() as signals, pytest.raises(LaunchError, match="'/nowhere' cannot be started"):
        run_hook(("/nowhere",), {}, LaunchLog(), signals)
