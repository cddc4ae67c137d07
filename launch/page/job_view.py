"""JobView: what a page can tell about the processes of this node, gathered when somebody looks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.launch.page.page_folder import CheckpointRecord, PageFolder, ServerRecord, WorkerRecord
from fleet.launch.page.stack_requests import StackRequests
from fleet.launch.plan.records import ProcessExit
from fleet.launch.processes.logs import read_tail
from fleet.launch.processes.process import Process
from fleet.launch.processes.report import describe_end, last_words
from fleet.launch.processes.stacks import ProcessFacts, facts_of
from fleet.launch.processes.worker_file import BEAT_NS, PAUSED, PID, STEP, WorkerFile

_FRESH_S = 0.9
_RATE_POINTS = 8
_SILENT_S = 10.0
_MIB = 1 << 20
GOOD, BAD, IDLE = "good", "bad", "idle"


@dataclass(frozen=True)
class ProcessRow:
    """One process as the page shows it; None is what is not known."""

    name: str  # "worker 3"
    host: str
    pid: int
    state: str
    tone: str  # good, bad or idle
    log_path: Path
    step: int | None = None
    rate: float | None = None  # steps/s
    memory_mib: float | None = None
    values: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name as identifiers and addresses take it."""
        return self.name.replace(" ", ".")

    @property
    def loss(self) -> float | None:
        """The newest value that is called a loss; of several, the first by length and alphabet."""
        names = sorted((name for name in self.values if "loss" in name.lower()), key=lambda name: (len(name), name))
        return self.values[names[0]] if names else None


@dataclass(frozen=True)
class Failure:
    """One failure: when, what followed, and its report."""

    at: float  # seconds since the epoch
    what: str
    report: str


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What does not change while the launcher runs."""

    job_id: str
    mode: str
    command: str
    launcher_log: Path


@dataclass
class _Seen:
    """A process, and the steps that it had finished at earlier looks."""

    process: Process
    file: WorkerFile | None
    points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_POINTS))


class JobView:
    """The processes, failures and values of this node's part of a job.

    The supervising thread reports what changes; the page's threads read. Nothing is gathered while nobody reads.

    Args:
        facts: of the job.
        folder: where the processes write.
    """

    def __init__(self, facts: JobFacts, folder: Path) -> None:
        self.facts = facts
        self.requests = StackRequests()
        self.began_at = time.time()
        self._folder = PageFolder(folder)
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._are_open = False  # the workers' files
        self._rows: list[ProcessRow] = []
        self._rows_at = -_FRESH_S
        self._failures: list[Failure] = []
        self._host, self._place, self.state = "", "", "starting"

    # What the supervising thread reports.

    def begin(self, host: str, place: str) -> None:
        """A generation of processes is about to start on this node.

        Args:
            host: address of this node.
            place: such as "node 0 of 2".
        """
        with self._lock:
            self._seen, self._are_open = {}, True
            self._host, self._place, self.state = host, place, "running"
            self._folder.forget_workers()

    def started(self, process: Process, file: WorkerFile | None) -> None:
        """A process has been started; another one of its name before it has ended."""
        with self._lock:
            self._seen[process.name] = _Seen(process, file)

    def answer(self) -> None:
        """Answers questions for stacks; called by the thread that reaps the processes."""
        live = {name: (s.process.pid, s.file) for name, s in self._seen.items() if s.process.ended is None}
        self.requests.answer(live)

    def forget(self) -> None:
        """The processes of this generation have ended, and their files are about to be closed."""
        with self._lock:
            self._rows = self._gather()
            self._are_open = False
        self.requests.answer({})

    def failed(self, first: ProcessExit, report: str, *, restarts: bool) -> None:
        """The generation has failed, by ``first``; ``restarts`` says whether the job starts again."""
        what = f"{_failed(first)}; the job {'starts again' if restarts else 'has ended'}"
        with self._lock:
            self._failures.append(Failure(time.time(), what, report))
            self.state = "restarting" if restarts else "failed"

    def replaced(self, ended: ProcessExit, log_start_bytes: int) -> None:
        """A process has failed and is started again in its place, while the others go on."""
        words = last_words(read_tail(ended.spec.log_path, from_bytes=log_start_bytes))
        with self._lock:
            what = f"{_failed(ended)}; it is started again"
            self._failures.append(Failure(time.time(), what, "\n".join(words)))

    def ended(self, exit_code: int) -> None:
        """The job has ended on this node."""
        with self._lock:
            self.state = f"ended with exit code {exit_code}"

    # What the page's threads read.

    @property
    def where(self) -> str:
        """Which node of the job this is."""
        return f"{self._place}, {self._host}" if self._host else ""

    def rows(self) -> list[ProcessRow]:
        """Returns the processes, servers first, each by rank; at most a second old."""
        with self._lock:
            now = time.monotonic()
            if self._are_open and now - self._rows_at >= _FRESH_S:
                self._rows, self._rows_at = self._gather(), now
            return self._rows

    def failures(self) -> Sequence[Failure]:
        """Returns the failures, newest first."""
        with self._lock:
            return self._failures[::-1]

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the points of each curve."""
        with self._lock:
            return {name: list(points) for name, points in self._folder.curves().items()}

    def servers(self) -> dict[int, list[ServerRecord]]:
        """Returns the measures of each parameter server of this node."""
        with self._lock:
            return self._folder.servers()

    def checkpoints(self) -> list[CheckpointRecord]:
        """Returns the newest checkpoints of the first worker that has some."""
        with self._lock:
            workers = [s.process.spec.index for s in self._seen.values() if s.process.spec.role == "worker"]
            folder = next((path for rank in workers if (path := self._folder.worker(rank).checkpoints)), None)
            return [] if folder is None else self._folder.checkpoints(folder)

    def _gather(self) -> list[ProcessRow]:
        now = time.monotonic()
        return [self._row(seen, now) for seen in self._seen.values()]

    def _row(self, seen: _Seen, now: float) -> ProcessRow:
        process = seen.process
        is_worker = process.spec.role == "worker"
        record = self._folder.worker(process.spec.index) if is_worker else WorkerRecord()
        step = _step_of(seen, record)
        if step is not None and process.ended is None:
            seen.points.append((now, step))
        facts = facts_of(process.pid) if process.ended is None else None
        state, tone = _state_of(seen, facts)
        return ProcessRow(
            name=process.name,
            host=self._host,
            pid=process.pid,
            state=state,
            tone=tone,
            log_path=process.spec.log_path,
            step=step,
            rate=_rate_of(seen, record),
            memory_mib=None if facts is None else facts.resident_bytes / _MIB,
            values=record.values,
        )


def _failed(ended: ProcessExit) -> str:
    return f"{ended.spec.role} {ended.spec.index} failed, {describe_end(ended)}"


def _step_of(seen: _Seen, record: WorkerRecord) -> int | None:
    if seen.process.ended is not None and seen.points:
        return max(seen.points[-1][1], record.step)
    if seen.file is not None and seen.file.words[PID]:
        return int(seen.file.words[STEP])
    return record.step or None


def _rate_of(seen: _Seen, record: WorkerRecord) -> float | None:
    """Returns the steps per second since the first of the last looks; before the second, what the worker measured."""
    if seen.process.ended is not None:
        return None
    if len(seen.points) > 1:
        (first_at, first), (last_at, last) = seen.points[0], seen.points[-1]
        return (last - first) / (last_at - first_at)
    return record.values.get("rate/steps_per_s")


def _state_of(seen: _Seen, facts: ProcessFacts | None) -> tuple[str, str]:
    """Returns the state in words, and its tone."""
    ended, file = seen.process.ended, seen.file
    if ended is not None:
        return ("ended", IDLE) if ended.exit_code == 0 else (f"failed: {describe_end(ended)}", BAD)
    if facts is not None and facts.is_stopped:
        return "stopped by a signal", BAD
    if file is None:
        return "running", GOOD
    words = file.words
    if not words[PID]:
        return "starting", IDLE
    if words[PAUSED]:
        return "paused", IDLE
    silent_s = (time.monotonic_ns() - words[BEAT_NS]) / 1e9
    if silent_s > _SILENT_S:
        return f"silent for {silent_s:.0f} s", BAD if words[STEP] else IDLE
    return "running", GOOD
