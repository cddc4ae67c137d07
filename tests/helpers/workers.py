"""Starts a few gloo processes on this machine, runs one function in each and returns their results.

Processes come from one fork server, so that a worker starts in a fraction of a second. It starts with the first call,
imports what ``tests/conftest.py`` names, and ends with the test run.

Example:
    >>> def add(rank, world_size, bias):
    ...     total = torch.tensor(float(rank + bias))
    ...     torch.distributed.all_reduce(total)
    ...     return total
    >>> run_workers(add, 2, 10)
    [tensor(21.), tensor(21.)]
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers._worker_process import Job, load_result, run_job

__all__ = ["WorkerError", "WorkerTimeout", "free_ports", "run_workers", "worker_environment"]

_GRACE_S = 3.0  # after the first failure, for the others to report theirs


class WorkerError(AssertionError):
    """A worker raised or died; ``rank`` is the one that failed first, ``kind`` the name of its exception class."""

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank, self.kind = rank, kind


class WorkerTimeout(WorkerError):
    """Some workers were still running when the time was up; the message holds their stacks."""


def run_workers(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str | None = "gloo",
    environment: Mapping[str, str | None] | Callable[[int], Mapping[str, str | None]] | None = None,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` in ``world_size`` processes and returns the results in rank order.

    Args:
        fn: a function at the top level of an importable module.
        world_size: number of processes.
        args: handed to ``fn``; anything that multiprocessing can carry.
        timeout_s: when it has passed, every process is killed and :class:`WorkerTimeout` is raised.
        backend: the process group that is started before ``fn`` and destroyed after it; ``None`` starts none, for
            a ``fn`` that calls ``fleet.init`` itself (what it leaves initialised is destroyed as well).
        environment: variables beside (or instead of) those of :func:`worker_environment`, the same for all ranks or
            a function of the rank; ``None`` as a value removes the variable.

    Returns:
        One result per rank: numbers, text, lists, tuples, dictionaries, tensors, numpy arrays, or ``None``.

    Raises:
        WorkerError: a worker raised; the message is its traceback and the end of its output.
        WorkerTimeout: not all were done in time.
    """
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise TypeError(f"run_workers takes a function at the top level of a module, not {fn.__qualname__!r}")
    folder = Path(tempfile.mkdtemp(prefix="fleet-workers-"))
    try:
        ports = free_ports(world_size + 1)
        processes = []
        context = multiprocessing.get_context("forkserver")
        with _one_thread():
            for rank in range(world_size):
                job = Job(
                    module=fn.__module__,
                    file=fn.__code__.co_filename,
                    qualname=fn.__qualname__,
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    environment=_merged(worker_environment(rank, world_size, ports), environment, rank),
                    folder=str(folder),
                    timeout_s=timeout_s,
                )
                processes.append(context.Process(target=run_job, args=(job, args), name=f"rank {rank}", daemon=True))
            for process in processes:
                process.start()
        _wait(processes, folder, timeout_s)
        return [load_result(folder, rank) for rank in range(world_size)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def worker_environment(rank: int, world_size: int, ports: list[int]) -> dict[str, str]:
    """Returns Fleet's and torch's variables of one worker on loopback; ``ports`` holds one more than the workers."""
    master, own = ports[0], ports[1:]
    endpoints = [f"127.0.0.1:{port}" for port in own]
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_LOCAL_SIZE": str(world_size),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(world_size),
        "PADDLE_NNODES": "1",
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_DISTRI_BACKEND": "gloo",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(master),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def free_ports(count: int) -> list[int]:
    """Returns ``count`` different loopback ports that nothing listened on a moment ago.

    They lie below the range from which the system gives ports to outgoing connections, so none of those takes one.
    """
    chosen: list[int] = []
    source = random.SystemRandom()
    while len(chosen) < count:
        port = source.randrange(15000, 32000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in chosen:
            chosen.append(port)
    return chosen


def free_port() -> int:
    """Returns one of :func:`free_ports`."""
    return free_ports(1)[0]


def _merged(
    base: dict[str, str],
    extra: Mapping[str, str | None] | Callable[[int], Mapping[str, str | None]] | None,
    rank: int,
) -> dict[str, str | None]:
    chosen = extra(rank) if callable(extra) else extra
    return {**base, **(chosen or {})}


@contextmanager
def _one_thread() -> Iterator[None]:
    """The fork server reads this when it starts; each worker would otherwise use every core."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _wait(processes: Sequence[BaseProcess], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    failed_at: float | None = None
    timed_out = False
    try:
        while True:
            running = [process for process in processes if process.exitcode is None]
            failed = [process for process in processes if process.exitcode not in (None, 0)]
            now = time.monotonic()
            failed_at = now if failed and failed_at is None else failed_at
            timed_out = bool(running) and now > deadline
            if not running or timed_out or (failed_at is not None and now > failed_at + _GRACE_S):
                break
            time.sleep(0.01)
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
        codes = [_end(process) for process in processes]
    _raise_first(codes, folder, timeout_s if timed_out else None)


def _end(process: BaseProcess) -> int:
    process.join(10.0)
    code = process.exitcode
    process.close()
    return -9 if code is None else code


def _raise_first(codes: list[int], folder: Path, timeout_s: float | None) -> None:
    """Raises for the rank whose error was written first; a rank that died without one counts after those."""
    reports = sorted(folder.glob("error.*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        rank = int(reports[0].name.split(".")[1])
        kind, _, text = reports[0].read_text().partition("\n")
        raise WorkerError(f"rank {rank} of {len(codes)} failed\n{text}\n{_output(folder, rank)}", rank, kind)
    bad = [rank for rank, code in enumerate(codes) if code != 0]
    if timeout_s is not None:
        outputs = "\n".join(_output(folder, rank) for rank in bad)
        raise WorkerTimeout(f"ranks {bad} of {len(codes)} still ran after {timeout_s} s\n{outputs}", bad[0], "timeout")
    if bad:
        raise WorkerError(f"rank {bad[0]} ended with {codes[bad[0]]}\n{_output(folder, bad[0])}", bad[0], "exit")


def _output(folder: Path, rank: int) -> str:
    path = folder / f"output.{rank}.txt"
    text = path.read_text(errors="replace")[-4000:] if path.exists() else ""
    return f"--- output of rank {rank} ---\n{text}" if text.strip() else ""
