"""Jobs of servers and workers that nobody launches: each process has its variables by hand, and nobody restarts it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.ready_python import Script, start_python
from tests.helpers.served import _free_endpoints

__all__ = ["HandStarted"]


class HandStarted:
    """The processes of one script in ``folder``, with what each writes in ``NAME.log`` there.

    Example:
        >>> job = HandStarted(folder, "from fleet import fleet; ...", servers=1, workers=2)
        >>> job.start("server-0")
        >>> job.start("worker-1", "its", "arguments")
        >>> job.wait("worker-1")
        0
        >>> job.end()
    """

    def __init__(self, folder: Path, script: str, servers: int, workers: int) -> None:
        self.folder, self.workers = folder, workers
        (folder / "train.py").write_text(script)
        self.endpoints = _free_endpoints(servers)
        self.processes: dict[str, Script] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Starts ``server-NUMBER`` or ``worker-NUMBER``."""
        kind, _, number = name.partition("-")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLEET_", "FLAGS_"))}
        own = {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
            "PADDLE_TRAINERS_NUM": f"{self.workers}",
            "FLEET_PS_FOLDER": str(self.folder / "state"),
            "FLEET_PS_LEASE": "10",
            "FLEET_JOB_SECRET": "ab" * 32,
            "OMP_NUM_THREADS": "1",
        }
        if kind == "server":
            host, _, port = self.endpoints[int(number)].partition(":")
            own |= {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
        else:
            own |= {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": number}
        with (self.folder / f"{name}.log").open("ab") as log:
            script, out = self.folder / "train.py", log.fileno()
            self.processes[name] = start_python(
                script, *arguments, out=out, err=out, cwd=self.folder, env={**kept, **own}
            )

    def wait(self, name: str, limit_s: float = 240.0) -> int:
        """Returns the exit status of a process, which is negative for a signal."""
        return self.processes[name].wait(limit_s)

    def until(self, found: Callable[[], bool], limit_s: float = 200.0) -> None:
        """Waits until something is true."""
        deadline = time.monotonic() + limit_s
        while not found():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """Returns the ends of all logs."""
        return "".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        """Kills what still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait(20.0)
