"""A real redis-server for tests, where the program is installed; it can be killed and started again with its data."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.helpers.processes import die_with_parent, freeze
from tests.helpers.workers import free_port

START_LIMIT_S = 30.0


def missing() -> str:
    """Returns why no test with Redis can run here; empty when one can."""
    if shutil.which("redis-server") is None:
        return "needs redis-server on PATH (Debian: apt-get install redis-server)"
    if importlib.util.find_spec("redis") is None:
        return "needs redis (pip install '.[redis]')"
    return ""


class RedisServer:
    """One redis-server that appends every write to its file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        """Returns a client."""
        import redis

        return redis.Redis(port=self.port, socket_timeout=20)

    def start(self) -> None:
        """Starts it on the data it has, and waits until it answers."""
        import redis

        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("redis-server", "--port", f"{self.port}", "--bind", "127.0.0.1", "--dir", f"{self._folder}"),
                    *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                time.sleep(0.02)
        raise AssertionError(
            f"redis-server did not start: {(self._folder / 'log').read_text(errors='replace')[-2000:]}"
        )

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends it with SIGKILL; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Lets it answer nothing from now on, while its port still takes connections."""
        freeze(self.pid)

    def thaw(self) -> None:
        """Lets it answer again."""
        os.kill(self.pid, signal.SIGCONT)
