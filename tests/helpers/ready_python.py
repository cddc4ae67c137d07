"""Runs scripts as ``python script`` does, in forks of one process that has imported torch already.

A script that trains imports for three seconds of processor time before its first line; a fork has that behind it. The
library itself is not imported before, and the script ends as any other: with its exit functions and its exit status.

Example:
    >>> run_python("import sys, torch; print(torch.ones(2).sum().item(), sys.argv[1])", "x").stdout
    '2.0 x\\n'
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.helpers.processes import die_with_parent

__all__ = ["Script", "ready_pid", "run_python", "start_python"]

_PROGRAM = Path(__file__).with_name("_ready_process.py")
_started: list[int] = []


class Script:
    """A running script, which ends with the ``with`` block; the methods are those of ``subprocess.Popen``."""

    def __init__(self, words: socket.socket, name: str) -> None:
        self._words, self._name = words, name
        pid, (self._watched,), _, _ = socket.recv_fds(words, 32, 1)
        self.pid = int(pid)
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Returns the exit status, which is negative for a signal."""
        if self.returncode is None:
            if not select.select([self._words], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._name, timeout)
            self.returncode = int(self._words.recv(32))
            self._words.close()
            os.close(self._watched)
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status of a script that has ended."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Sends a signal to the script, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, number)

    def kill(self) -> None:
        """Ends the script at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(20.0)


def start_python(
    script: str | Path,
    *arguments: str,
    out: int,
    err: int,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
) -> Script:
    """Starts a script.

    Args:
        script: its text, or a file.
        arguments: what it finds in ``sys.argv``.
        out: the descriptor of a file for its standard output.
        err: that of its standard error.
        cwd: its folder.
        env: its variables instead of this process's. Of those that Python reads, ``PYTHONPATH`` alone counts.
        warnings: what would stand behind ``-W``.
    """
    asked = {
        "code": script.read_text() if isinstance(script, Path) else script,
        "file": f"{script}" if isinstance(script, Path) else "",
        "arguments": list(arguments),
        "cwd": f"{Path(cwd).absolute()}",
        "env": dict(os.environ if env is None else env),
        "warnings": list(warnings),
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(_ready(), [json.dumps(asked).encode()], [out, err, theirs.fileno()])
    return Script(ours, asked["file"] or "a script")


def run_python(
    script: str | Path,
    *arguments: str,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end, as :func:`start_python` starts it; kills it after ``timeout_s``."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with start_python(
            script, *arguments, out=out.fileno(), err=err.fileno(), cwd=cwd, env=env, warnings=warnings
        ) as started:
            code = started.wait(timeout_s)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess([f"{script}", *arguments], code, *texts)


def ready_pid() -> int | None:
    """Returns the process that forks, which ends with the test run, or None before the first script."""
    return _started[0] if _started else None


@cache
def _ready() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, f"{_PROGRAM}", f"{theirs.fileno()}"],
            env={**kept, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    process.returncode = 0  # it ends when this process does: nobody waits for it, and Popen must not warn of that
    _started.append(process.pid)
    atexit.register(ours.close)
    return ours
