"""The ResNet example for its tests: its modules, and its scripts as child processes with and without the launcher."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.ready_python import start_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "resnet"
# The smallest network and images that still learn something in a few steps.
TINY = ("--width", "4", "--image-size", "8", "--log-every", "1")
_SET_BY_LAUNCHERS = ("PADDLE_", "FLAGS_", "FLEET_", "POD_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")


def example_module(name: str) -> ModuleType:
    """Returns a module of the example; its scripts import each other from their own folder, as Python does."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))


def environment() -> dict[str, str]:
    """Returns this process's variables without those of a job, with the package on the path and one CPU thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LAUNCHERS)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        kept.pop(name, None)
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(script: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example in one process."""
    return [sys.executable, str(EXAMPLE / script), *arguments]


def launched(script: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of the example in two processes."""
    launcher = [sys.executable, "-m", "fleet.launch", "--gpus=0,1", "--log_dir", "log"]
    return [*launcher, str(EXAMPLE / script), *arguments]


@contextmanager
def running(line: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command in ``folder``, its output in the file ``output`` there, and ends it with all its children."""
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            line,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(line: list[str], folder: Path, limit_s: float = 60.0) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and everything it wrote."""
    python, *words = line
    options = []
    while words[0] == "-W":
        options.append(words[1])
        words = words[2:]
    if python == sys.executable and words[0].endswith(".py"):
        code = _run_script(words, options, folder, limit_s)
    else:
        with running(line, folder) as process:
            code = process.wait(limit_s)
    return code, (folder / "output").read_text(errors="replace")


def _run_script(words: list[str], options: list[str], folder: Path, limit_s: float) -> int:
    """Runs what needs no interpreter of its own."""
    script, *arguments = words
    with (
        (folder / "output").open("wb") as output,
        start_python(
            Path(script),
            *arguments,
            out=output.fileno(),
            err=output.fileno(),
            cwd=folder,
            env=environment(),
            warnings=options,
        ) as started,
    ):
        return started.wait(limit_s)


def train(line: list[str], folder: Path, limit_s: float = 60.0) -> str:
    """Runs a training command that must succeed; returns what it wrote."""
    code, output = run(line, folder, limit_s)
    assert code == 0, output
    return output


def wait_for(text: str, path: Path, limit_s: float = 60.0) -> None:
    """Returns when ``text`` stands in the file."""
    deadline = time.monotonic() + limit_s
    while not (path.is_file() and text in path.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"{text!r} did not come: {path.read_text() if path.is_file() else path}"
        time.sleep(0.05)


def descendants(pid: int) -> dict[int, dict[str, str]]:
    """Returns the environment of every process below ``pid``, by process id."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    below = {pid}
    for _ in parents:
        below |= {child for child, parent in parents.items() if parent in below}
    found = {}
    for child in below - {pid}:
        raw = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace")
        found[child] = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
    return found


def history(path: Path) -> list[dict[str, Any]]:
    """Returns the records that a training script wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]
