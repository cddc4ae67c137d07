"""JobView: the processes of this node as a page shows them, gathered when somebody looks.

StackRequests: a page asks for the stacks of a process, and the thread that supervises it answers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.launch.page.job_charts import is_loss
from fleet.launch.page.page_folder import (
    CheckpointLooks,
    CheckpointRecord,
    PageFolder,
    ProgressRecord,
    ServerRecord,
    WorkerRecord,
)
from fleet.launch.plan.records import ProcessExit
from fleet.launch.processes.logs import read_tail
from fleet.launch.processes.process import Process
from fleet.launch.processes.report import describe_end, last_words
from fleet.launch.processes.signals import Wakeup
from fleet.launch.processes.stacks import (
    AskedWorker,
    ProcessFacts,
    facts_of,
    is_stopped,
    signal_for_stacks,
    wait_for_stacks,
)
from fleet.launch.processes.worker_file import BEAT_NS, NUM_WORDS, PAUSED, PID, SHOWS_STACKS, STEP, WorkerFile

Live = Mapping[str, tuple[int, WorkerFile | None]]
_FRESH_S = 0.9
_RATE_POINTS = 8
_SILENT_S = 10.0
_MIB = 1 << 20
_FILE_CLOCK_NS = 20_000_000  # the time of a file may be so much behind
GOOD, BAD, IDLE = "good", "bad", "idle"


class StackRequests(Wakeup):
    """Hands questions from the page's threads to the supervising thread; ``fileno`` is readable while somebody asks.

    A process id may be given back as soon as that thread has reaped the process, so no other thread sends signals. It
    waits for nothing: the thread that asks reads the stacks from the file of the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: queue.SimpleQueue[_Question] = queue.SimpleQueue()

    def ask(self, name: str, limit_s: float = 10.0) -> str:
        """Returns the stacks of all threads of the process ``name``, or a sentence that says why there are none."""
        question = _Question(name)
        self._asked.put(question)
        # A full pipe is readable already, which is all that the byte is for.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"?")
        if not question.answered.wait(limit_s):
            return f"No answer within {limit_s:g} s: the launcher is starting or stopping processes. Ask again."
        asked = question.asked
        if asked is None:
            return question.answer
        stack = wait_for_stacks({question.pid: asked})[question.pid]
        cut = "" if stack.is_whole else "[cut off: the process wrote no more within a second]\n"
        return stack.text + cut if stack.text else f"{name} (process {question.pid}) wrote no stack within a second."

    def answer(self, live: Live) -> None:
        """Answers the waiting questions; ``live`` are the process id and file of each process that runs, by name."""
        self.drain()
        asked = []
        while not self._asked.empty():
            asked.append(self._asked.get())
        known = {name: live[name] for name in {question.name for question in asked} & set(live)}
        # A stopped process would have to go on to write its stacks, and a page changes nothing.
        files = [(pid, file) for pid, file in known.values() if file is not None and not is_stopped(pid)]
        signalled = signal_for_stacks(files) if files else {}
        for question in asked:
            pid, file = known.get(question.name, (0, None))
            question.give(pid, signalled.get(pid), "" if pid in signalled else _why_none(question.name, file, pid))


class _Question:
    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.asked: AskedWorker | None = None
        self.answer = ""
        self.answered = threading.Event()

    def give(self, pid: int, asked: AskedWorker | None, answer: str) -> None:
        self.pid = pid
        self.asked = asked
        self.answer = answer
        self.answered.set()


def _why_none(name: str, file: WorkerFile | None, pid: int) -> str:
    if not pid:
        return f"{name} does not run."
    if file is None:
        return f"{name} shows no stacks: only workers do. With py-spy: py-spy dump --pid {pid}"
    if not file.words[SHOWS_STACKS]:
        return f"{name} has not called fleet.init() yet, or has ended it. With py-spy: py-spy dump --pid {pid}"
    return (
        f"{name} (process {pid}) is stopped by a signal or a debugger, and would have to go on to write "
        f"its stacks. With py-spy: py-spy dump --nonblocking --pid {pid}"
    )


@dataclass(frozen=True)
class ProcessRow:
    """One process as the page shows it; a value that is not known is None."""

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
    progress: ProgressRecord | None = None

    @property
    def key(self) -> str:
        """The name as identifiers and addresses take it."""
        return self.name.replace(" ", ".")

    @property
    def loss(self) -> float | None:
        """The newest value that is called a loss; of several, the first by length and alphabet."""
        names = sorted((name for name in self.values if is_loss(name)), key=lambda name: (len(name), name))
        return self.values[names[0]] if names else None


@dataclass(frozen=True)
class Failure:
    """One failure: its time, its consequence, and its report."""

    at: float  # seconds since the epoch
    what: str
    report: str


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The facts that do not change while the launcher runs."""

    job_id: str
    mode: str
    command: str
    launcher_log: Path


@dataclass
class _Seen:
    """A process, and the steps that it had finished at earlier looks."""

    process: Process
    file: WorkerFile | None
    words: Sequence[int] = ()  # of the file, while it was open last
    points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_POINTS))

    def look(self) -> None:
        """Takes over the numbers of the file."""
        if self.file is not None:
            self.words = tuple(self.file.words[:NUM_WORDS])


class JobView:
    """The processes, failures and values of this node's part of a job.

    The supervising thread reports the changes; the page's threads read. Nothing is gathered while nobody reads. The
    supervising thread takes no lock under which a file is read, and reads none of the page: whatever those hold, and
    however long a file system takes, it goes on.

    Args:
        facts: of the job.
        folder: where the processes write.
    """

    def __init__(self, facts: JobFacts, folder: Path) -> None:
        self.facts = facts
        self.requests = StackRequests()
        self.began_at = time.time()
        self._ended_at: float | None = None
        self._folder = PageFolder(folder)
        self._checkpoints = CheckpointLooks()
        # Held by the page's threads alone, around the files and the records read from them: a slow file system blocks
        # only them.
        self._reading = threading.Lock()
        # Held by every thread, around memory alone, so that supervision never waits for a file; taken after _reading.
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._are_open = False  # the workers' files
        self._rows: list[ProcessRow] = []
        self._rows_at = -_FRESH_S
        self._failures: list[Failure] = []
        self._host = ""
        self._place = ""
        self.state = "starting"

    # Called by the supervising thread, which reports the changes.

    def begin(self, host: str, place: str) -> None:
        """A generation of processes is about to start on this node.

        Args:
            host: address of this node.
            place: such as "node 0 of 2".
        """
        with self._lock:
            self._seen = {}
            self._are_open = True
            self._host = host
            self._place = place
            self.state = "running"
            self._folder.since_ns = time.time_ns() - _FILE_CLOCK_NS

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
            for seen in self._seen.values():
                seen.look()
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
            self._ended_at = time.time()

    # Called by the page's threads, which read.

    @property
    def where(self) -> str:
        """Which node of the job this is."""
        return f"{self._place}, {self._host}" if self._host else ""

    @property
    def elapsed_s(self) -> float:
        """The seconds since the launcher began, at most until the job ended on this node."""
        return (self._ended_at or time.time()) - self.began_at

    def rows(self) -> list[ProcessRow]:
        """Returns the processes, servers first, each by rank; at most a second old."""
        with self._reading:
            now = time.monotonic()
            if now - self._rows_at >= _FRESH_S:
                self._rows = self._gather(now)
                self._rows_at = now
            return self._rows

    def failures(self) -> Sequence[Failure]:
        """Returns the failures, newest first."""
        with self._lock:
            return self._failures[::-1]

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the points of each curve."""
        with self._reading:
            return {name: list(points) for name, points in self._folder.curves().items()}

    def servers(self) -> dict[int, list[ServerRecord]]:
        """Returns the measures of each parameter server of this node."""
        with self._reading:
            return self._folder.servers()

    def checkpoints(self) -> list[CheckpointRecord]:
        """Returns the newest checkpoints of the first worker that has some.

        Raises:
            TimeoutError: their folder does not answer.
        """
        with self._reading:
            with self._lock:
                workers = [s.process.spec.index for s in self._seen.values() if s.process.spec.role == "worker"]
            folder = next((path for rank in workers if (path := self._folder.worker(rank).checkpoints)), None)
        return [] if folder is None else self._checkpoints.newest(folder)

    def _gather(self, now: float) -> list[ProcessRow]:
        with self._lock:
            processes = list(self._seen.values())
            for seen in processes if self._are_open else ():
                seen.look()
        return [self._row(seen, now) for seen in processes]

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
            progress=record.progress if process.ended is None else None,
        )


def _failed(ended: ProcessExit) -> str:
    return f"{ended.spec.role} {ended.spec.index} failed, {describe_end(ended)}"


def _step_of(seen: _Seen, record: WorkerRecord) -> int | None:
    if seen.process.ended is not None and seen.points:
        return max(seen.points[-1][1], record.step)
    if seen.words and seen.words[PID]:
        return seen.words[STEP]
    return record.step or None


def _rate_of(seen: _Seen, record: WorkerRecord) -> float | None:
    """Returns the steps per second since the first of the last looks; before two, the rate that the worker measured."""
    if seen.process.ended is not None:
        return None
    if len(seen.points) > 1:
        (first_at, first), (last_at, last) = seen.points[0], seen.points[-1]
        return (last - first) / (last_at - first_at)
    return record.values.get("rate/steps_per_s")


def _state_of(seen: _Seen, facts: ProcessFacts | None) -> tuple[str, str]:
    """Returns the state in words, and its tone."""
    ended = seen.process.ended
    words = seen.words
    if ended is not None:
        return ("ended", IDLE) if ended.exit_code == 0 else (f"failed: {describe_end(ended)}", BAD)
    if facts is not None and facts.is_stopped:
        return "stopped by a signal", BAD
    if not words:
        return "running", GOOD
    if not words[PID]:
        return "starting", IDLE
    if words[PAUSED]:
        return "paused", IDLE
    silent_s = (time.monotonic_ns() - words[BEAT_NS]) / 1e9
    if silent_s > _SILENT_S:
        return f"silent for {silent_s:.0f} s", BAD if words[STEP] else IDLE
    return "running", GOOD
