"""Processes of a demonstration: run for as long as they are needed, and waited for."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 180.0  # for imports, and for compiling what numba has not compiled before


@contextlib.contextmanager
def running(*command: str | Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a command for as long as the block; stops it where it has not ended."""
    process = subprocess.Popen([str(part) for part in command], text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def wait_for(path: Path, process: subprocess.Popen[str], log: Path) -> None:
    """Returns when ``path`` is there.

    Raises:
        SystemExit: ``process`` has ended, or it takes too long; the message names its ``log``.
    """
    deadline = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"Training wrote no {path}; its log is in {log}.")
        time.sleep(0.1)
