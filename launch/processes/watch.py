"""What the launcher shares with its workers while they run: their heartbeats, and the request to save and stop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Protocol

from fleet.launch.plan.records import LaunchConfig, ProcessExit, ProcessSpec
from fleet.launch.processes.heartbeat import Heartbeats
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.process import Process
from fleet.launch.processes.signals import HasFileno
from fleet.launch.processes.worker_file import PID, STEP, STOP_ASKED, TAKES_TIMES, WorkerFile

FILE_VARIABLE = "FLEET_WORKER_FILE"


class ProcessObserver(Protocol):
    """What is told of the processes, and may ask for their stacks: the page of the job."""

    @property
    def requests(self) -> HasFileno:
        """A descriptor that is readable while :meth:`answer` is wanted."""

    def started(self, process: Process, file: WorkerFile | None) -> None:
        """A process has been started."""

    def replaced(self, ended: ProcessExit, log_start_bytes: int) -> None:
        """A process has failed, and is about to be started again in its place."""

    def answer(self) -> None:
        """Answers what was asked about the processes that run."""

    def forget(self) -> None:
        """The processes have ended, and their files are about to be closed."""


class WorkerWatch:
    """The shared files of the workers of one generation on this node.

    Args:
        heartbeat_s: how long a worker may be silent; 0: it may.
        preempt_grace_s: how long a job that is asked to stop may take to save itself; 0: it is not asked.
        is_alone: whether all workers of the job are on this node.
        log: where findings go.
        lenient: whether nobody asked for a limit, so that only workers that all wait for each other are ended.
        observer: is told of every process; None where nobody looks.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float,
        preempt_grace_s: float,
        is_alone: bool,
        log: LaunchLog,
        lenient: bool = False,
        observer: ProcessObserver | None = None,
    ) -> None:
        self.observer = observer
        self._heartbeats = Heartbeats(heartbeat_s, log, is_alone=is_alone, lenient=lenient) if heartbeat_s else None
        self.preempt_grace_s = preempt_grace_s
        self._files: dict[int, WorkerFile] = {}

    @property
    def period_s(self) -> float | None:
        """How often :meth:`check` wants to be called; None: never."""
        return None if self._heartbeats is None else self._heartbeats.period_s

    def prepare(self, spec: ProcessSpec) -> None:
        """Makes the file of a worker that is about to start."""
        if FILE_VARIABLE in spec.environment:
            file = WorkerFile.create(Path(spec.environment[FILE_VARIABLE]))
            file.words[TAKES_TIMES] = int(self._heartbeats is not None and self._heartbeats.compares_speed)
            self._files[spec.local_index] = file

    def started(self, process: Process) -> None:
        """Watches a worker from now on."""
        if self.observer is not None:
            is_worker = FILE_VARIABLE in process.spec.environment
            self.observer.started(process, self._files[process.spec.local_index] if is_worker else None)
        if FILE_VARIABLE in process.spec.environment and self._heartbeats is not None:
            self._heartbeats.add(process, self._files[process.spec.local_index])

    def check(self) -> Process | None:
        """Returns a worker that hangs, once; None when none does."""
        return None if self._heartbeats is None else self._heartbeats.check()

    def steps(self, spec: ProcessSpec) -> int:
        """Returns how many steps a worker has finished, as far as it told."""
        file = self._files.get(spec.local_index) if spec.role == "worker" else None
        return 0 if file is None else file.words[STEP]

    def saves_on(self, signals: Sequence[int]) -> bool:
        """Returns whether these signals to the launcher ask the workers to save; Ctrl-C and others do not."""
        return bool(self.preempt_grace_s) and set(signals) == {SIGTERM}

    def ask_to_stop(self, workers: Iterable[Process]) -> None:
        """Asks the workers to save and stop: in their files, or by SIGTERM those that do not read one.

        No data-loader process gets a signal: it would end, and the worker with it, before anything is saved.
        """
        for worker in workers:
            file = self._files.get(worker.spec.local_index)
            if file is not None and file.words[PID]:
                file.words[STOP_ASKED] = 1
            else:
                worker.terminate()

    def close(self) -> None:
        """Lets go of the files."""
        if self.observer is not None:
            self.observer.forget()
        for file in self._files.values():
            file.close()
            with contextlib.suppress(OSError):
                os.unlink(file.path)
        self._files = {}


def open_watch(
    config: LaunchConfig, log: LaunchLog, num_nodes: int, observer: ProcessObserver | None = None
) -> WorkerWatch | None:
    """Returns the watch that ``config`` asks for; None when it asks for none."""
    if not config.watches_workers:
        return None
    return WorkerWatch(
        heartbeat_s=config.heartbeat_timeout_s,
        preempt_grace_s=config.preempt_grace_s,
        is_alone=num_nodes == 1,
        log=log,
        lenient=config.heartbeat_is_default,
        observer=observer,
    )
