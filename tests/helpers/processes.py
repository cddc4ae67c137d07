"""Processes of tests: what they do before they become what they are, and how they are stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.PyDLL(None).prctl


def die_with_parent() -> None:
    """Lets the kernel kill this process when the test run dies, so that nothing is left behind."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def freeze(pid: int, limit_s: float = 10.0) -> None:
    """Stops a process; returns when none of its threads runs any longer, which SIGSTOP alone does not wait for."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + limit_s
    while any(_state(thread) not in "TtZ" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} runs {limit_s:g} s after SIGSTOP"
        time.sleep(0.002)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return "Z"
