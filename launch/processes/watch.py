"""The files that the launcher shares with its workers: their heartbeats, and the request to save and stop."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Protocol

from fleet.launch.plan.records import LaunchConfig, ProcessExit, ProcessSpec
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.process import Process
from fleet.launch.processes.signals import HasFileno
from fleet.launch.processes.stacks import Stack, ask_for_stacks, is_stopped
from fleet.launch.processes.worker_file import (
    BEAT_NS,
    OWN_NS,
    OWN_STEPS,
    PAUSED,
    PID,
    STEP,
    STOP_ASKED,
    TAKES_TIMES,
    WorkerFile,
)

# The first step compiles, opens data and waits for the others to do so.
FIRST_STEP_FACTOR = 10
# With other nodes in the job, a node whose workers all wait gives the node of the hanging worker this long to report
# it first.
_DEFER_S = 2.0
# Without a limit that was asked for: workers that wait this long without a computation anywhere do not go on.
_STILL_S = 10.0
_STILL_CPU = 0.01
_ALL_WAITED = "All workers of this node waited for others, and none computed."
_IF_BUSY = (
    "If it was busy rather than stuck, let it call fleet.heartbeat() in what takes long, or with pause=True before it."
)
_SLOW_PERIOD_S = 30.0
_SLOW_STEPS = 20
_SLOW_FACTOR = 1.5
_MAX_STACK_LINES = 20
FILE_VARIABLE = "FLEET_WORKER_FILE"


@dataclass
class Pulse:
    """One worker as the launcher sees it."""

    process: Process
    file: WorkerFile
    step: int = 0  # finished when the hang was noticed
    own_ns: int = 0  # at the last report on speed
    own_steps: int = 0

    @property
    def rank(self) -> int:
        """The worker's rank in the job."""
        return self.process.spec.index

    def late_s(self, now_ns: int, limit_s: float) -> float | None:
        """Returns how long the worker has been silent when that is longer than it may; None otherwise."""
        words = self.file.words
        if self.process.ended is not None or not words[PID] or words[PAUSED]:
            return None
        silent_s = (now_ns - words[BEAT_NS]) / 1e9
        return silent_s if silent_s > (limit_s if words[STEP] else limit_s * FIRST_STEP_FACTOR) else None


class Heartbeats:
    """Watches the workers of one generation.

    Args:
        limit_s: how long a worker may be silent.
        log: where the findings go.
        is_alone: whether all workers of the job are on this node.
        lenient: ends a worker only when all of this node wait for each other and none computes; others are reported.
    """

    def __init__(self, limit_s: float, log: LaunchLog, *, is_alone: bool = True, lenient: bool = False) -> None:
        self._limit_s = limit_s
        self._log = log
        self._is_alone = is_alone
        self._lenient = lenient
        self._still = Stillness()
        self._is_reported = False
        self._look_at = 0.0
        self._pulses: list[Pulse] = []
        self._waiting_since: float | None = None
        self._reported_at = time.monotonic()
        self.period_s = max(min(limit_s / 10, 5.0 if lenient else 0.5), 0.05)

    @property
    def compares_speed(self) -> bool:
        """Whether slow workers are reported; only where somebody asked for a limit."""
        return not self._lenient

    def add(self, process: Process, file: WorkerFile) -> None:
        """Watches one more worker."""
        self._pulses.append(Pulse(process, file))

    def check(self) -> Process | None:
        """Returns the worker to end because it hangs, and says so with all stacks; None when none does."""
        if self.compares_speed:
            self._report_slow()
        now_ns = time.monotonic_ns()
        late = {pulse.rank: late_s for pulse in self._pulses if (late_s := pulse.late_s(now_ns, self._limit_s))}
        if not late:
            self._waiting_since = None
            self._is_reported = False
            self._still = Stillness()
            return None
        if self._lenient and time.monotonic() < self._look_at:
            return None
        if self._waiting_since is not None and time.monotonic() - self._waiting_since < _DEFER_S:
            return None
        running = [pulse for pulse in self._pulses if pulse.process.ended is None and pulse.file.words[PID]]
        stopped = {pulse.rank for pulse in running if is_stopped(pulse.process.pid)}
        for pulse in running:
            # A stopped worker goes on as soon as a signal asks it for its stack, so its step is taken over here.
            pulse.step = pulse.file.words[STEP]
        if self._lenient and stopped:
            # A worker that was stopped from outside is reported only; its stopper will let it go on.
            self._report_late(late, {})
            return None
        found = ask_for_stacks((pulse.process.pid, pulse.file) for pulse in running)
        stacks = {pulse.rank: found.get(pulse.process.pid, Stack()) for pulse in running}
        if self._lenient and not self._is_deadlock(running, late, stacks):
            return None
        suspects = [p for p in running if p.rank in late and (p.rank in stopped or not stacks[p.rank].waits)]
        if not suspects and not self._is_alone and self._waiting_since is None:
            self._waiting_since = time.monotonic()
            return None
        # The others wait for the worker that is furthest behind. Among equals a worker that a signal has stopped comes
        # first, then the longest silence.
        chosen = min(
            suspects or [pulse for pulse in running if pulse.rank in late],
            key=lambda p: (p.step, p.rank not in stopped, p.file.words[BEAT_NS]),
        )
        self._say(chosen, running, late, stopped, stacks, certain=bool(suspects))
        return chosen.process

    def _is_deadlock(self, running: Sequence[Pulse], late: dict[int, float], stacks: dict[int, Stack]) -> bool:
        """Returns whether all workers wait for each other and have done so for long enough, without any computation."""
        waits = len(late) == len(running) and all(stacks[pulse.rank].waits for pulse in running)
        # Workers of other nodes may compute unseen, so stillness here has to last longer before it proves anything.
        needed_s = _STILL_S if self._is_alone else self._limit_s
        still_s = self._still.look([pulse.process.pid for pulse in running]) if waits else self._still.forget()
        self._look_at = time.monotonic() + (min(needed_s, self._limit_s / 6) if waits else self._limit_s / 6)
        if not waits:
            self._report_late(late, stacks)
        return waits and still_s >= needed_s

    def _report_late(self, late: dict[int, float], stacks: dict[int, Stack]) -> None:
        """Logs once the workers that have been silent for long; in an evaluation, a save or an upload that is well."""
        self._look_at = time.monotonic() + self._limit_s / 6
        if self._is_reported:
            return
        self._is_reported = True
        rank = next((rank for rank in late if rank in stacks and not stacks[rank].waits), min(late))
        place = f"; it is at {stacks[rank].place}" if rank in stacks and stacks[rank].frames else ""
        self._log.warning(
            f"rank {rank} has not finished a step for {late[rank]:.0f} s{place}. It goes on: it may evaluate, save or "
            "load. --heartbeat_timeout=S ends a worker that is silent for S seconds."
        )

    def _say(
        self,
        chosen: Pulse,
        running: Sequence[Pulse],
        late: dict[int, float],
        stopped: set[int],
        stacks: dict[int, Stack],
        *,
        certain: bool,
    ) -> None:
        for pulse in sorted(running, key=lambda p: (p is not chosen, p.rank)):
            stack = stacks[pulse.rank]
            step = pulse.step + 1
            place = f"it is at {stack.place}" if stack.frames else "its stack is unknown"
            if pulse.rank in stopped:
                place = f"it was stopped by a signal (SIGSTOP); {place}"
            if pulse.rank not in late:
                self._log.error(f"rank {pulse.rank} is in step {step}; {place}")
            elif pulse is chosen or not stack.waits:
                self._log.error(f"rank {pulse.rank} has not finished step {step} for {late[pulse.rank]:.0f} s; {place}")
            else:
                self._log.error(f"rank {pulse.rank} waits for other ranks in step {step}; {place}")
        gone = [p.process.ended for p in self._pulses if p.process.ended is not None and p.process.ended.exit_code == 0]
        for end in gone:
            self._log.error(
                f"rank {end.spec.index} ended normally (exit code 0) {time.monotonic() - end.ended_at:.0f} s ago."
            )
        if not certain:
            self._log.error(self._conclusion(bool(gone)))
        for pulse in running:
            lines = stacks[pulse.rank].text.splitlines()
            shown = [f"  {frame}" for frame in stacks[pulse.rank].frames[:_MAX_STACK_LINES]]
            self._log.plain("\n".join([f"Stack of rank {pulse.rank}, innermost call first:", *shown]))
            if len(lines) > len(shown) + 1:
                self._log.file_only("\n".join([f"All threads of rank {pulse.rank}:", *lines]))
        chosen.process.kill_reason = (
            f"The launcher killed it: it had not finished step {chosen.step + 1} for "
            f"{late[chosen.rank]:.0f} s, and --heartbeat_timeout is {self._limit_s:g} s. "
            f"{_ALL_WAITED if self._lenient else _IF_BUSY}"
        )

    def _conclusion(self, others_ended: bool) -> str:
        """Returns the likely causes when every rank of this node waits."""
        if others_ended:
            return "The others wait for a rank that has ended: do all workers have equally many batches?"
        if self._is_alone:
            return (
                "Every rank waits for the others, and all of them are here: they are in different calls, or one has "
                "left out a call that all have to make. Compare the places above."
            )
        return "Every rank of this node waits for others; the cause may be in the network or another node."

    def _report_slow(self) -> None:
        """Says, every half a minute, which worker's own work takes longest when that is half as long again."""
        now = time.monotonic()
        if now - self._reported_at < _SLOW_PERIOD_S:
            return
        self._reported_at = now
        times: dict[int, float] = {}
        for pulse in self._pulses:
            own_ns, own_steps = pulse.file.words[OWN_NS], pulse.file.words[OWN_STEPS]
            steps = own_steps - pulse.own_steps
            if steps >= _SLOW_STEPS and pulse.process.ended is None:
                times[pulse.rank] = (own_ns - pulse.own_ns) / steps / 1e9
                pulse.own_ns = own_ns
                pulse.own_steps = own_steps
        line = slow_line(times)
        if line:
            self._log.warning(line)


class Stillness:
    """For how long a set of processes has used no processor worth mentioning, seen from one look to the next."""

    def __init__(self) -> None:
        self._since = self._looked_at = time.monotonic()
        self._used: dict[int, float] = {}

    def look(self, pids: Sequence[int]) -> float:
        """Returns the seconds since the first of the looks between which ``pids`` did nothing."""
        now = time.monotonic()
        used = {pid: processor_s(pid) for pid in pids}
        allowed_s = _STILL_CPU * (now - self._looked_at)
        if used.keys() != self._used.keys() or any(used[pid] - self._used[pid] > allowed_s for pid in used):
            self._since = now
        self._looked_at = now
        self._used = used
        return now - self._since

    def forget(self) -> float:
        """Starts counting again: somebody works."""
        self._used = {}
        return 0.0


def processor_s(pid: int) -> float:
    """Returns the seconds of processor time that all threads of a process have used; 0 when it is gone."""
    try:
        # The command's name may hold spaces and parentheses, so counting begins behind the last one: utime and stime,
        # fields 14 and 15 in proc(5), are elements 11 and 12.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slow_line(times_s: dict[int, float]) -> str:
    """Returns the sentence about the slowest rank, or an empty string when it is not slower by half than the others.

    Args:
        times_s: seconds that a step takes without waiting, by rank; waiting for others is not among them.

    Example:
        >>> slow_line({0: 0.1, 1: 0.1, 2: 0.3})
        'rank 2 is slow: its own work takes 0.3 s a step, that of the others 0.1 s. The job waits for it.'
    """
    if len(times_s) < 2:
        return ""
    slowest = max(times_s, key=lambda rank: times_s[rank])
    others = statistics.median(value for rank, value in times_s.items() if rank != slowest)
    if times_s[slowest] < _SLOW_FACTOR * others:
        return ""
    return (
        f"rank {slowest} is slow: its own work takes {times_s[slowest]:.3g} s a step, that of the others "
        f"{others:.3g} s. The job waits for it."
    )


class ProcessObserver(Protocol):
    """A listener that hears of the processes, and may ask for their stacks: the page of the job."""

    @property
    def requests(self) -> HasFileno:
        """A descriptor that is readable while :meth:`answer` is wanted."""

    def started(self, process: Process, file: WorkerFile | None) -> None:
        """A process has been started."""

    def replaced(self, ended: ProcessExit, log_start_bytes: int) -> None:
        """A process has failed, and is about to be started again in its place."""

    def answer(self) -> None:
        """Answers the questions about the processes that run."""

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
        heartbeat_s=config.processes.heartbeat_timeout_s,
        preempt_grace_s=config.processes.preempt_grace_s,
        is_alone=num_nodes == 1,
        log=log,
        lenient=config.processes.heartbeat_is_default,
        observer=observer,
    )
