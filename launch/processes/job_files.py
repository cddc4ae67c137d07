"""The files beside the logs: endpoints.log, envlog.N and backup_env.N.json, written before the processes start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fleet.launch.cli.texts import backup_environment, endpoints_log, environment_log
from fleet.launch.plan.records import ProcessSpec
from fleet.launch.processes.logs import open_log, write_all


def write_job_files(log_dir: Path, specs: Sequence[ProcessSpec]) -> None:
    """Writes what the processes read at their start and what a person wants to look up; replaces older files.

    The processes' own log files are there afterwards: one that cannot be written is found before any process starts.
    """
    if not specs:
        return
    _write(log_dir / "endpoints.log", endpoints_log(specs))
    for spec in specs:
        if spec.environment_log_path is not None:
            _write(spec.environment_log_path, environment_log(spec))
        if spec.backup_path is not None:
            _write(spec.backup_path, backup_environment(spec))
        os.close(open_log(spec.log_path))


def _write(path: Path, text: str) -> None:
    fd = open_log(path, os.O_WRONLY | os.O_TRUNC)
    try:
        write_all(fd, text.encode())
    finally:
        os.close(fd)
