"""A parameter server as a process of its own: ``python -m tests.helpers.ps_server_process '{"endpoint": ...}'``.

The argument holds fields of ``ServerConfig``. Lines of the log go to stdout; ``ENDED`` is the last one of a clean end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """Starts the process and waits until it listens.

    Args:
        config: fields of ``ServerConfig``; ``folder`` as text.
        environment: variables beside the inherited ones.
    """

    def __init__(self, config: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.ps_server_process", json.dumps(config)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
        )
        deadline = time.monotonic() + 40
        while True:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the server did not start: {self.lines}")
            self.lines.append(line.strip())
            if " is listening on " in line:
                self.endpoint = line.split()[-1]
                return

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self.signal(signal.SIGKILL)
        self.join()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def join(self, timeout_s: float = 20) -> int:
        """Waits for the end and returns the exit code."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError("the server did not end") from None
        if self._process.stdout is not None and not self._process.stdout.closed:
            self.lines += [line.strip() for line in self._process.stdout]
            self._process.stdout.close()
        return code


def _main() -> None:
    from fleet.ps.server.server_config import ServerConfig
    from fleet.ps.server.server_process import run_server
    from tests.fleet.ps.service import SECRET

    fields = json.loads(sys.argv[1])
    if fields.get("folder"):
        fields["folder"] = Path(fields["folder"])
    secret = fields.pop("secret").encode() if "secret" in fields else SECRET
    run_server(ServerConfig(**fields, secret=secret), notify=lambda line: print(line, flush=True))
    print("ENDED", flush=True)


if __name__ == "__main__":
    _main()
