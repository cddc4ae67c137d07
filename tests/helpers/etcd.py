"""A real etcd for tests, where the program is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.processes import die_with_parent, freeze
from tests.helpers.workers import free_port

START_LIMIT_S = 20.0


def missing() -> str:
    """Returns why no test with etcd can run here; empty when one can."""
    if shutil.which("etcd") is None:
        return "needs etcd on PATH (Debian: apt-get install etcd-server)"
    if importlib.util.find_spec("etcd3gw") is None:
        return "needs etcd3gw (pip install '.[elastic]')"
    return ""


class Etcd:
    """One etcd with its data in ``folder``; it can be killed, started again with its data, and frozen.

    Args:
        folder: where its data and its log lie.
        host: the address it listens on.
        port: its port; a free one of this machine when 0.
        inside: words that enter a network namespace and then become etcd.
        flags: more of etcd's own flags.
        scheme: http, or https with TLS flags.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        inside: Sequence[str] = (),
        flags: Sequence[str] = (),
        scheme: str = "http",
    ) -> None:
        self._folder, self._host, self._inside, self._flags, self._scheme = folder, host, inside, flags, scheme
        self.port = port or free_port()
        self._peer_port = 2380 if inside else free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        """Its ip:port."""
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        """Starts it on the data it has, and waits until it answers."""
        log_path = self._folder / "log"
        start_bytes = log_path.stat().st_size if log_path.exists() else 0
        client, peer = f"{self._scheme}://{self._host}:{self.port}", f"http://{self._host}:{self._peer_port}"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(*self._inside, "etcd", "--data-dir", f"{self._folder / 'data'}"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"default={peer}", *self._flags),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self._wait_until_ready(start_bytes)

    def _wait_until_ready(self, start_bytes: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            text = (self._folder / "log").read_bytes()[start_bytes:]
            if b"ready to serve client requests" in text or b"serving client traffic" in text:
                return
            time.sleep(0.05)
        raise AssertionError(f"etcd did not start: {(self._folder / 'log').read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """Ends it at once; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Lets it answer nothing from now on, while its port still takes connections."""
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        """Lets it answer again."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)
