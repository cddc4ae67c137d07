"""Real launchers as child processes, with workers that use the standard library only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

LIMIT_S = 40.0
ROOT = Path(__file__).resolve().parents[2]


class Launcher:
    """One ``python -m fleet.launch`` in ``folder``; output goes to files, so that no pipe is ever full.

    ``inside`` stands before the command: words that enter a network namespace and then become the launcher.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *flags: str,
        env: dict[str, str] | None = None,
        args: Iterable[str] = (),
        inside: Iterable[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "train.py").write_text(script)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "FLEET_", "POD_", "FLAGS_"))}
        environ = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        self._out, self._err = (folder / "stdout").open("wb"), (folder / "stderr").open("wb")
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "fleet.launch", *flags, "train.py", *args],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    @property
    def stdout(self) -> str:
        """What the launcher wrote to standard output so far."""
        return (self.folder / "stdout").read_bytes().decode(errors="replace")

    @property
    def stderr(self) -> str:
        """What the launcher wrote to standard error so far."""
        return (self.folder / "stderr").read_bytes().decode(errors="replace")

    def log(self, name: str = "workerlog.0") -> str:
        """The text of a log file; empty when there is none yet."""
        path = self.folder / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def printed_secret(self) -> str:
        """The job's secret that the printed command for the other nodes refers to."""
        path = Path(self.wait_for(r'FLEET_JOB_SECRET="\$\(cat (\S+) 2>/dev/null \|\| ssh ', "stdout")[1])
        assert path.stat().st_mode & 0o777 == 0o600
        return path.read_text().strip()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The launcher's exit code."""
        return self.process.wait(limit_s)

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher alone."""
        os.kill(self.process.pid, number)

    def wait_for(self, pattern: str, name: str = "workerlog.0", limit_s: float = LIMIT_S) -> re.Match[str]:
        """Waits until ``pattern`` stands in a log file (or in ``stdout``/``stderr``)."""
        deadline = time.monotonic() + limit_s
        while True:
            text = getattr(self, name) if name in ("stdout", "stderr") else self.log(name)
            found = re.search(pattern, text)
            if found:
                return found
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{pattern!r} not in {name}: {text[-2000:]}\nstderr: {self.stderr[-3000:]}")
            time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether ``pid`` runs; a process that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until_gone(pids: Iterable[int], limit_s: float) -> list[int]:
    """The processes that still run after ``limit_s``; kills them then, so that a failed test leaves none."""
    pids = list(pids)
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
