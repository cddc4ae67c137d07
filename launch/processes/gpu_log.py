"""{job_id}.gpu.log: load and memory of this node's GPUs while the job runs, by nvidia-smi, one line per card."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fleet.common.own_thread import OwnThread
from fleet.errors import LaunchError
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog, open_log, write_all

PERIOD_S = 10.0
_LIMIT_S = 8.0
_FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")
HEADER = "time,index,gpu_percent,memory_used_mib,memory_total_mib,temperature_c,power_w\n"


@contextlib.contextmanager
def write_gpu_log(config: LaunchConfig, log: LaunchLog, period_s: float = PERIOD_S) -> Iterator[None]:
    """Samples the GPUs of ``config`` from a thread while the context is open; a warning says when that cannot be."""
    if config.processes.device_type != "gpu" or not config.logs.has_gpu_log:
        yield
        return
    path = config.logs.folder / f"{config.job_id}.gpu.log"
    program = shutil.which("nvidia-smi")
    if program is None:
        log.warning(f"--enable_gpu_log: nvidia-smi is not on the PATH, so {path} is not written.")
        yield
        return
    stopping = threading.Event()
    arguments = (program, config.processes.device_names, path, log, stopping, period_s)
    sampler = OwnThread(_sample, *arguments, name="gpu-log", say=log.warning)
    sampler.start()
    try:
        yield
    finally:
        stopping.set()
        sampler.join(_LIMIT_S)


def _sample(
    program: str, devices: tuple[str, ...], path: Path, log: LaunchLog, stopping: threading.Event, period_s: float
) -> None:
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    if devices:
        command.append(f"--id={','.join(devices)}")
    try:
        fd = open_log(path)
    except (OSError, LaunchError) as error:
        log.warning(f"--enable_gpu_log: {path} cannot be written: {error}")
        return
    try:
        if os.fstat(fd).st_size == 0:
            write_all(fd, HEADER.encode())
        while True:
            problem = _write_sample(command, fd)
            if problem:
                log.warning(f"--enable_gpu_log: {problem}; {path} ends here.")
                return
            if stopping.wait(period_s):
                return
    finally:
        os.close(fd)


def _write_sample(command: list[str], fd: int) -> str:
    """Appends one line for each card; returns the error, or an empty string."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            return f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}"
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = [",".join([moment, *(v.strip() for v in row.split(","))]) for row in done.stdout.splitlines() if row]
        write_all(fd, "".join(f"{line}\n" for line in lines).encode())
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {_LIMIT_S:g} s"
    except OSError as error:
        return f"{error.strerror or error}"
    return ""
