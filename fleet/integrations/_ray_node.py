"""LauncherActor: runs in each bundle of a placement group and holds the launcher of its node."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from fleet.env import Environment
from fleet.integrations._ray_request import SET_VARIABLES
from fleet.launch.plan.ports import free_ports

_BLOCK = 1 << 16
_KEPT = ("FLEET_POD",)  # a cluster that a job's worker has started ends with that job


class LauncherActor:
    """Starts a launcher, passes on its output, and stops it.

    Its methods take and return text and numbers, so that Ray pickles nothing else. The launcher ends when this process
    ends, see ``fleet/integrations/_tied_launcher.py``.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self) -> tuple[str, int]:
        """Returns the address of this node and a free port."""
        host: str = ray.util.get_node_ip_address()
        return host, free_ports(1, host)[0]

    def start(
        self, flags: Sequence[str], log_dir: str, command: Sequence[str], folder: str, env: Mapping[str, str]
    ) -> str:
        """Starts the launcher; returns an empty text, or the reason why it could not start.

        Args:
            flags: flags of the launcher.
            log_dir: receives its log files; without ``folder`` it lies in the folder for temporary files.
            command: the script and its arguments.
            folder: its working folder; empty for the folder that Ray has unpacked, and removes after the job.
            env: variables added to the environment of this process.
        """
        logs = Path(log_dir) if folder else Path(tempfile.gettempdir()) / log_dir
        argv = [sys.executable, "-m", "fleet.integrations._tied_launcher", *flags, f"--log_dir={logs}", "--", *command]
        try:
            self._process = subprocess.Popen(
                argv,
                cwd=folder or None,
                env={**_own_environment(), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"the launcher cannot start in {folder!r} there: {error.strerror}"
        return ""

    def follow(self, limit_s: float) -> tuple[str, int | None]:
        """Returns the launcher's new output, and its exit code, None while it runs.

        Waits up to ``limit_s`` for either.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ended = process.poll() is not None
        ready, _, _ = select.select([process.stdout], [], [], 0 if ended else limit_s)
        block = os.read(process.stdout.fileno(), _BLOCK) if ready else b""
        if block:
            return self._decoder.decode(block), None
        if not ended and ready:  # it has closed its output
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            ended = process.poll() is not None
        return self._decoder.decode(b"", final=ended), process.returncode if ended else None

    def stop(self, limit_s: float) -> None:
        """Ends the launcher with its workers: SIGTERM, after ``limit_s`` SIGKILL; its guardian ends the rest."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)  # a no-op after its end
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            self.follow(0.1)  # a full pipe would block the launcher
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _own_environment() -> dict[str, str]:
    """Returns this process's variables with the GPUs of the bundle, and without those of another job."""
    found = Environment().inherited()
    for name in SET_VARIABLES:
        if name not in _KEPT:
            found.pop(name, None)
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    # A blank value would count as not set, and the launcher would take every GPU of the machine.
    return {**found, "CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1"}
