"""Starts the processes of one generation on this node, watches them, and leaves none behind.

The watch is event-driven: one selector waits for the ends of the processes (pidfd), for signals to the launcher and
for news from the other nodes. ``epoll`` hands the ends over in the order in which they happened, and so makes
the first failure the first.

Who the peers are is not known here. :class:`PeerNews` is all that supervision sees of the membership.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from signal import SIGTERM
from types import TracebackType
from typing import Protocol

from fleet.launch.plan.records import GroupResult, ProcessExit, ProcessSpec
from fleet.launch.processes.guardian import Guardian, kill_group, kill_marked
from fleet.launch.processes.logs import LaunchLog, LogEcho
from fleet.launch.processes.process import Process
from fleet.launch.processes.report import choose_first_failure, left_servers_line, looks_like_victim
from fleet.launch.processes.signals import SignalInbox
from fleet.launch.processes.watch import WorkerWatch
from fleet.launch.processes.worker_file import PREEMPTED
from fleet.launch.restarts import GO_ON, NO_RESTARTS, REPLACE, TOO_LATE, RestartRule

# After a failure the others may sit in a collective that nobody will join: they get this long, not the user's grace.
FAILURE_GRACE_S = 0.3
# How long servers may take to return from run_server() once the last worker has said goodbye.
SERVER_RETURN_S = 3.0
_SETTLE_S = 0.03
_DYING_S = 0.1
_VICTIM_S = 0.2
# Whoever lost a peer has a cause, which may still be ending: a worker without batches left takes torch down.
_CAUSE_S = 2.0
_POLL_S = 0.02
# Whoever did not save itself within the grace is not given much more.
_AFTER_PREEMPTION_S = 5.0
# Between the ends of workers of two nodes that saved themselves at the same step: taking torch down.
_OTHERS_LEFT_S = 20.0
# A killed process that is still there after this long waits in the kernel for a device; nobody can end it.
_UNKILLABLE_S = 5.0


@dataclass(frozen=True)
class PeerEvent:
    """A wish of the other nodes to this one: ``stop`` its processes within ``grace_s``, or end its ``servers``."""

    kind: str  # "stop" or "servers"
    grace_s: float = FAILURE_GRACE_S


class PeerNews(Protocol):
    """The membership as supervision sees it: a descriptor to wait on, events, and the report of finished workers."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable while :meth:`take` has something."""

    def take(self) -> PeerEvent | None:
        """Returns the next event, or None."""

    def workers_done(self) -> None:
        """Says that every worker of this node has exited with 0; an event "servers" answers when all nodes said so."""


class ProcessGroup:
    """The processes of one generation; leaving the ``with`` block kills and reaps whatever is left of them."""

    def __init__(
        self,
        *,
        mark: str,
        inherited: Mapping[str, str],
        guardian: Guardian,
        signals: SignalInbox,
        news: PeerNews | None = None,
        output_fd: int = 1,
    ) -> None:
        self._mark = mark
        self._inherited = inherited
        self._guardian = guardian
        self._signals = signals
        self._news = news
        self._output_fd = output_fd
        self.watch: WorkerWatch | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        if news is not None:
            self._selector.register(news, selectors.EVENT_READ)
        self._echoes: list[LogEcho] = []
        self.processes: list[Process] = []

    @property
    def log_starts(self) -> dict[int, int]:
        """By process id, the size that its log had when the process started."""
        return {process.pid: process.log_start_bytes for process in self.processes}

    def watch_with(self, watch: WorkerWatch) -> None:
        """Watches the processes that are started from now on with ``watch``."""
        self.watch = watch
        if watch.observer is not None:
            self._selector.register(watch.observer.requests, selectors.EVENT_READ, watch.observer)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._selector.close()

    def start(self, spec: ProcessSpec) -> Process:
        """Starts one process; its end is watched from now on."""
        if self.watch is not None:
            # The worker opens the file as it starts.
            self.watch.prepare(spec)
        process = Process(spec, self._inherited, mark=self._mark)
        # The guardian hears of it at once: a launcher that is killed a moment later must leave no process behind.
        self._guardian.add_group(process.pid)
        if self.watch is not None:
            self.watch.started(process)
        self.processes.append(process)
        if process.pidfd is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        if spec.echo:
            echo = LogEcho(spec.log_path, from_bytes=process.log_start_bytes, output_fd=self._output_fd)
            self._echoes.append(echo)
        return process

    def running(self, role: str | None = None) -> list[Process]:
        """Returns the processes, of ``role`` or all, whose end has not been seen."""
        return [p for p in self.processes if p.ended is None and role in (None, p.spec.role)]

    def wait(self, timeout_s: float | None = None) -> list[ProcessExit]:
        """Waits for something to happen; returns the ends it saw, in the order in which they happened.

        It returns an empty list on a signal, on news and at the timeout.
        """
        polled = [p for p in self.running() if p.pidfd is None]
        if polled:
            timeout_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
        ends = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Process) and (ended := key.data.poll()) is not None:
                self._selector.unregister(key.fileobj)
                ends.append(ended)
            elif self.watch is not None and self.watch.observer is not None and key.data is self.watch.observer:
                self.watch.observer.answer()
        ends += [ended for p in polled if (ended := p.poll()) is not None]
        return ends

    def terminate(self) -> None:
        """Sends SIGTERM to every process."""
        for process in self.running():
            process.terminate()

    def stop(self, grace_s: float) -> None:
        """Ends every process: SIGTERM to each, SIGKILL to its group after ``grace_s``, and a sweep by mark.

        A signal to the launcher cuts the grace short.
        """
        self.terminate()
        deadline = time.monotonic() + grace_s
        while self.running() and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
            if self._signals.take():
                break
            if self._news is not None:
                # The event is taken so that its descriptor is not readable any more; this node is stopping already.
                self._news.take()
        self.kill()

    def kill(self) -> None:
        """Kills the rest of the group, wherever it has moved, finishes the echo and gives the process ids back."""
        for process in self.processes:
            kill_group(process.pid)
        deadline = time.monotonic() + _UNKILLABLE_S
        while self.running() and time.monotonic() < deadline:
            self.wait(_POLL_S)
            # A signal that is left untaken would end every further wait at once.
            self._signals.take()
        if self.processes:
            # A process that left its group with setsid() still carries the mark.
            kill_marked(self._mark)
        for echo in self._echoes:
            echo.finish()
        for process in self.processes:
            # Before the id is given back: the guardian could otherwise kill a stranger's group of that number.
            self._guardian.remove_group(process.pid)
            if process.ended is not None:
                process.reap()
        self.processes = []
        self._echoes = []


@dataclass(kw_only=True)
class Supervisor:
    """Runs groups of processes, one generation after the other, and says how each ended.

    Args:
        log: where the launcher's lines go.
        signals: the signals to the launcher; one of them ends the group with its code.
        guardian: kills the processes should the launcher itself be killed.
        mark: the job's ``FLEET_POD``.
        inherited: the environment the processes start from.
        grace_s: how long a process has between SIGTERM and SIGKILL when the job is stopped by a signal.
        output_fd: where the log of the echoed process is copied to.
    """

    log: LaunchLog
    signals: SignalInbox
    guardian: Guardian
    mark: str
    inherited: Mapping[str, str]
    grace_s: float
    output_fd: int = 1

    def __post_init__(self) -> None:
        self._ending: Callable[[GroupResult], None] = lambda result: None
        self._rule = NO_RESTARTS
        self._replaced = 0

    def run(
        self,
        specs: Sequence[ProcessSpec],
        *,
        news: PeerNews | None = None,
        watch: WorkerWatch | None = None,
        ends_servers: bool = True,
        rule: RestartRule = NO_RESTARTS,
        started: Callable[[], None] = lambda: None,
        ending: Callable[[GroupResult], None] = lambda result: None,
    ) -> GroupResult:
        """Runs ``specs`` until all have ended, one has failed, a signal has come, or the peers want a stop.

        Args:
            specs: the processes, servers first.
            news: the wishes of the other nodes; None on one node.
            watch: the files that the workers share with the launcher; None when nothing needs them.
            ends_servers: whether the end of this node's workers is the end of its servers. False when the workers
                of other nodes use them and no membership tells when those are done: the servers return by themselves.
            rule: the restart rule of the job.
            started: called once every process runs.
            ending: called on a failure or a signal before anything is stopped, so that the other nodes hear of the
                cause before they feel its effects.
        """
        self._ending = ending
        self._rule = rule
        self._replaced = 0
        with contextlib.ExitStack() as stack:
            # The watch stands before the group on the stack, so its files are closed after the last process has ended.
            if watch is not None:
                stack.callback(watch.close)
            group = stack.enter_context(self._group(news))
            if watch is not None:
                group.watch_with(watch)
            for spec in specs:
                group.start(spec)
            started()
            return self._supervise(group, news, watch, ends_servers)

    def _group(self, news: PeerNews | None) -> ProcessGroup:
        return ProcessGroup(
            mark=self.mark,
            inherited=self.inherited,
            guardian=self.guardian,
            signals=self.signals,
            news=news,
            output_fd=self.output_fd,
        )

    def _supervise(
        self, group: ProcessGroup, news: PeerNews | None, watch: WorkerWatch | None, ends_servers: bool
    ) -> GroupResult:
        roles = {process.spec.role for process in group.processes}
        workers_are_done = False
        servers_may_end = False
        while True:
            # A signal to this launcher comes before everything that it may have caused.
            if signals := self.signals.take():
                if watch is not None and watch.saves_on(signals):
                    return self._preempt(group, news, watch, asked=True)
                return self._stop(group, signals)
            event = None if news is None else news.take()
            if event is not None and event.kind == "stop":
                group.stop(event.grace_s)
                return GroupResult(exit_code=0, interrupted=True)
            servers_may_end |= event is not None and event.kind == "servers"
            if not workers_are_done and not group.running("worker"):
                workers_are_done = True
                if news is not None:
                    # The event "servers" comes once every node has said so.
                    news.workers_done()
                else:
                    servers_may_end = ends_servers and "worker" in roles
            if "server" in roles and (servers_may_end or not group.running()):
                return self._end_servers(group, news)
            if not group.running():
                return GroupResult(exit_code=0)
            ends = group.wait(None if watch is None else watch.period_s)
            if ends and "server" in roles:
                self._say_who_left(group, ends)
            failures = [ended for ended in ends if ended.exit_code]
            # A worker that saved itself was asked to by the launcher of another node; the others are saving too.
            if watch is not None and watch.preempt_grace_s and failures and failures[0].exit_code == PREEMPTED:
                return self._preempt(group, news, watch, asked=False)
            if left := self._follow_rule(group, failures):
                return self._fail(group, left)
            if watch is not None and (hung := watch.check()) is not None:
                # The end of the hung worker is the failure that the next round sees.
                hung.kill()

    def _say_who_left(self, group: ProcessGroup, ends: Sequence[ProcessExit]) -> None:
        """Warns of a worker that ended well in the middle of the others' training: they may wait for it for minutes."""
        starts = group.log_starts
        others = [process.spec.index for process in group.running("worker")]
        for line in filter(None, (left_servers_line(ended, others, starts[ended.pid]) for ended in ends)):
            self.log.warning(line)

    def _follow_rule(self, group: ProcessGroup, failures: list[ProcessExit]) -> list[ProcessExit]:
        """Starts failed processes again as the rule says; returns the failures that end the generation."""
        left = []
        servers = [process.ended for process in group.processes if process.spec.role == "server"]
        have_ended = bool(servers) and all(ended is not None and not ended.exit_code for ended in servers)
        for ended in failures:
            running = [process.spec for process in group.running("server")]
            spec = ended.spec
            end = f"{spec.role} {spec.index} ended with code {ended.exit_code}"
            step = self._rule.of_process(spec, replaced=self._replaced, running=running, servers_have_ended=have_ended)
            if step == REPLACE:
                self._replaced += 1
                self.log.warning(f"{end} and is started again; {self._rule.limit - self._replaced} restart(s) left")
                self._replace(group, ended)
            elif step == GO_ON:
                self.log.warning(f"{end}; the other of its pair, server and standby, goes on alone")
            else:
                if step == TOO_LATE:
                    self.log.error(
                        f"{end} after the parameter servers, which had no worker left to wait for: it is not started "
                        "again"
                    )
                left.append(ended)
        return left

    @staticmethod
    def _replace(group: ProcessGroup, ended: ProcessExit) -> None:
        if group.watch is not None and group.watch.observer is not None:
            group.watch.observer.replaced(ended, group.log_starts[ended.pid])
        # The echo of the first process goes on with the same log file.
        group.start(replace(ended.spec, echo=False))

    def _preempt(self, group: ProcessGroup, news: PeerNews | None, watch: WorkerWatch, *, asked: bool) -> GroupResult:
        """Lets the workers save and stop by themselves: asked by a signal here, or by the launcher of another node."""
        grace_s = watch.preempt_grace_s
        if asked:
            self.log.info(f"Terminating with signal {SIGTERM}: the workers have {grace_s:g} s to save and stop")
            watch.ask_to_stop(group.running("worker"))
        deadline = time.monotonic() + grace_s
        failures: list[ProcessExit] = []
        others_left = False
        while group.running("worker") and (left_s := deadline - time.monotonic()) > 0:
            failures += [ended for ended in group.wait(left_s) if ended.exit_code not in (0, PREEMPTED)]
            if failures:
                return self._fail(group, failures)
            if signals := self.signals.take():
                if asked or not watch.saves_on(signals):
                    # Two signals stop the group without the grace.
                    return self._stop(group, [*signals, *signals])
                # The workers are leaving already; after a signal here this node does not come back.
                asked = True
            if news is not None and (event := news.take()) is not None and event.kind == "stop":
                # The workers of another node have left; those of this one leave at the same step.
                others_left = True
                deadline = min(deadline, time.monotonic() + _OTHERS_LEFT_S)
        if others_left and not asked:
            group.stop(FAILURE_GRACE_S)
            return GroupResult(exit_code=0, interrupted=True, preempted=True)
        if group.running("worker"):
            why = "The others have left" if others_left else f"--preempt_grace of {grace_s:g} s is over"
            return self._cut_short(group, why)
        if any(p.ended is not None and p.ended.exit_code == PREEMPTED for p in group.processes):
            self.log.info("The workers have saved and stopped; starting the job again continues it.")
            result = GroupResult(exit_code=PREEMPTED, stop_signal=SIGTERM, preempted=True)
            self._ending(result)
        else:
            # The workers had finished before they read the request.
            result = GroupResult(exit_code=0, preempted=True)
        group.stop(self.grace_s)
        return result

    def _cut_short(self, group: ProcessGroup, why: str) -> GroupResult:
        """Ends workers that did not save themselves in time."""
        self.log.warning(f"{why}, and not every worker has stopped by itself.")
        result = GroupResult(exit_code=128 + SIGTERM, stop_signal=SIGTERM)
        self._ending(result)
        group.stop(min(self.grace_s, _AFTER_PREEMPTION_S))
        return result

    def _end_servers(self, group: ProcessGroup, news: PeerNews | None) -> GroupResult:
        """Gives the servers a moment to return from run_server(), then asks them to end, and says if one fails at it.

        One that still publishes its last rows goes on when it is asked, for as long as a sink may take.
        """
        self.log.info("all workers exit, going to finish parameter server and heter_worker.")
        deadline = time.monotonic() + SERVER_RETURN_S
        asked = False
        while group.running():
            if (left_s := deadline - time.monotonic()) <= 0:
                if asked:
                    break
                group.terminate()
                asked = True
                deadline = time.monotonic() + self.grace_s
                continue
            ends = group.wait(left_s)
            # A server that ends by the SIGTERM of this method has not failed.
            if failures := [ended for ended in ends if ended.exit_code and not (asked and ended.exit_code > 128)]:
                return self._fail(group, failures)
            if signals := self.signals.take():
                return self._stop(group, signals)
            if news is not None and (event := news.take()) is not None and event.kind == "stop":
                group.stop(event.grace_s)
                return GroupResult(exit_code=0, interrupted=True)
        group.kill()
        self.log.info("all parameter server are killed.")
        return GroupResult(exit_code=0)

    def _stop(self, group: ProcessGroup, signals: Sequence[int]) -> GroupResult:
        """Stops the group because of a signal to the launcher."""
        self.log.info(f"Terminating with signal {signals[0]}")
        result = GroupResult(exit_code=128 + signals[0], stop_signal=signals[0])
        self._ending(result)
        group.stop(self.grace_s if len(signals) == 1 else 0.0)
        return result

    def _fail(self, group: ProcessGroup, failures: list[ProcessExit]) -> GroupResult:
        """Names the first failure, and stops the rest without the long grace."""
        starts = group.log_starts
        # The process that ended first may be a victim whose cause is still ending.
        self._settle(group, failures, starts)
        first = choose_first_failure(failures, starts)
        result = GroupResult(
            exit_code=first.exit_code,
            first_failure=first,
            log_start_bytes=starts[first.pid],
            ended_before=self._ended_well(group),
        )
        self._ending(result)
        group.stop(FAILURE_GRACE_S)
        return result

    @staticmethod
    def _ended_well(group: ProcessGroup) -> tuple[ProcessExit, ...]:
        """Returns the workers that have ended with 0, with the steps that they had done."""
        ends = [p.ended for p in group.processes if p.ended is not None and p.spec.role == "worker"]
        steps = (lambda spec: 0) if group.watch is None else group.watch.steps
        return tuple(replace(end, steps=steps(end.spec)) for end in ends if end.exit_code == 0)

    def _settle(self, group: ProcessGroup, failures: list[ProcessExit], starts: Mapping[int, int]) -> None:
        """Waits for the processes that are failing at this very moment, before a SIGTERM of ours blurs the picture.

        The cause of a failure can end after its victim: its sockets close while the kernel still frees its memory, or
        while its interpreter still prints the traceback.
        """
        began = time.monotonic()
        while group.running():
            limit_s = _SETTLE_S
            if any(process.is_dying() for process in group.running()):
                limit_s = _DYING_S
            if all(looks_like_victim(ended, starts[ended.pid]) for ended in failures):
                limit_s = _VICTIM_S if self._ended_well(group) else _CAUSE_S
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                return
            failures += [ended for ended in group.wait(min(left_s, _POLL_S)) if ended.exit_code]
