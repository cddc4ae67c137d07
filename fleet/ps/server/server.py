"""One parameter server: listens, gives each connection a thread, and ends when the workers are gone.

::

    server = Server(ServerConfig(endpoint="127.0.0.1:0", num_workers=2))
    server.start()
    print(server.endpoint)
    server.wait()      # returns when every worker said goodbye, or one said stop
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fleet.common.own_thread import OwnThread
from fleet.errors import FleetError, PSError
from fleet.ps.publishing.publisher import Publisher, boot_id
from fleet.ps.publishing.versions import mark_of
from fleet.ps.server.answers import Answers
from fleet.ps.server.connected_worker import ConnectedWorker
from fleet.ps.server.folder_lock import FolderLock
from fleet.ps.server.job_state import JobState, Refused
from fleet.ps.server.journal import Journal
from fleet.ps.server.measures import Summary
from fleet.ps.server.newcomers import Complaints, Newcomers, host_of
from fleet.ps.server.operations import Operations
from fleet.ps.server.reader_requests import ReaderRequests
from fleet.ps.server.served_table import make_served_table
from fleet.ps.server.server_config import USUAL_CONNECTIONS, ServerConfig, connections_allowed
from fleet.ps.server.server_files import load_tables, save_tables
from fleet.ps.server.server_state import MakeTable, ServerState
from fleet.ps.server.snapshot import has_snapshot, is_lost, recover, write_snapshot
from fleet.ps.standby.movable_shard import MovableShard
from fleet.ps.standby.pair import Pair, Turn
from fleet.ps.wire.auth import check_secret, prove_to_worker, turn_away
from fleet.ps.wire.sealed import BodyDigest
from fleet.ps.wire.transport import Acceptor, Connection, ConnectionLost, SocketTransport, TransferTimeout, Transport

MAX_UNPROVEN = 64  # connections that have not proven the secret yet


class Server:
    """A parameter server in this process; see :func:`fleet.ps.server.server_process.run_server` for the
    arguments."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        transport: Transport | None = None,
        notify: Callable[[str], None] = print,
        make_table: MakeTable | None = None,
    ) -> None:
        # Before anything is changed: a broken numba is an error here, and the kernel of the seals is loaded while files
        # can be opened.
        BodyDigest(b"")([bytes(8)], 8)
        self.config = config
        self.is_finishing = False  # the workers are gone, and the sink takes the last rows
        self.is_new = False  # it serves from the start of the job: nothing was recovered or taken over
        self._transport = transport or SocketTransport()
        self._notify = notify
        self._make_table = make_table or (lambda spec: make_served_table(spec, config.folder))
        self._use(self._make_state())
        self._listener: Acceptor | None = None
        self._open: dict[Connection, threading.Thread] = {}
        self._not_workers: set[threading.Thread] = set()  # they serve readers, the other server of the pair or the user
        self._newcomers = Newcomers()
        self._complaints = Complaints(notify)
        self._max_connections = USUAL_CONNECTIONS
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._folder_lock: FolderLock | None = None
        self._threads: list[OwnThread] = []
        self._snapshotting = threading.Lock()  # taken before the state's own
        self._turn_over = threading.Event()
        self._pair: Pair | None = None
        if config.peer or config.places:
            kind = MovableShard if config.places else Pair
            self._pair = kind(config, self._transport, self._make_state, self._hang_up, notify)
        readers = ReaderRequests(config, lambda: self.state, None if self._pair is None else self._pair.readable)
        self._answers = Answers(config, lambda: self._operations, readers, self._pair, notify)

    def _make_state(self) -> ServerState:
        config = self.config
        journal = Journal(None if config.folder is None else config.folder / "journal", config.journal_level)
        job = JobState(config.num_workers, journal.lock, config.lease_s, config.job)
        job.published.on = config.publish is not None
        return ServerState(job, journal, self._make_table, sync=config.mode == "sync")

    def _use(self, state: ServerState) -> None:
        config = self.config
        self.state = state
        self._operations = Operations(
            config,
            state,
            self.snapshot,
            lambda fields: save_tables(state, config, fields),
            lambda fields: load_tables(state, config, fields),
            self._mark,
        )
        self._publisher: Publisher | None = None
        if config.publish is not None:
            self._publisher = Publisher(state, config.publish, server=config.index, notify=self._notify)

    def _mark(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self._publisher is None:
            raise Refused("this server publishes no rows, so it has none to name. Call fleet.ps.publish on every role.")
        self._publisher.mark(mark_of(fields))
        return {}

    @property
    def endpoint(self) -> str:
        """Where the server listens."""
        assert self._listener is not None
        return self._listener.endpoint

    def start(self, prepare: Callable[[ServerState], None] | None = None) -> None:
        """Recovers the state in the folder, then listens.

        ``prepare`` is called in between, unless there was state to recover: it can make tables and fill them.
        """
        config = self.config
        state = self.state
        check_secret(config.endpoint, config.secret)
        self._max_connections = connections_allowed(config.max_connections)
        if self._max_connections < USUAL_CONNECTIONS and config.max_connections is None:
            self._notify(
                f"parameter server {config.index} takes {self._max_connections} connections: this process may not "
                "open more files (ulimit -n)"
            )
        try:
            if config.folder is not None:
                self._folder_lock = FolderLock(config.folder)
            if self._pair is not None and not self._pair.settle_role():
                self._pair.follow(self._take_over)
                self._listen(self._accept)
                return
            self.is_new = self._recover()
        except FleetError:
            raise
        except OSError as error:
            raise PSError(f"parameter server {config.index} cannot use its folder {config.folder}: {error}.") from error
        if prepare is not None and self.is_new:
            prepare(state)
        if self._pair is not None:
            self._pair.lead(state, has_standby=True)
        self._ready()
        self._listen(self._accept, self._watch, self._keep)

    def _take_over(self, state: ServerState) -> None:
        """Serves the state of a standby that was promoted."""
        self._use(state)
        self.is_new = False
        self._turn_over = threading.Event()
        state.evict_all()
        if state.job.published.history:
            state.begin_history("", boot_id())  # the sink may have rows that this server lacks
        self._ready()
        self._run(self._watch, self._keep)

    def _step_back(self) -> None:
        """Follows the other server, which has taken over, and drops the state here."""
        assert self._pair is not None
        state = self.state
        # A snapshot in progress ends first, and none begins after the turn.
        with self._snapshotting:
            self._turn_over.set()
        if self._publisher is not None:
            self._publisher.stop()
        state.journal.close()
        self._pair.step_back(self._take_over)
        with state.job.changed:
            state.job.stop()

    def _ready(self) -> None:
        state = self.state
        if state.sync:
            state.apply_ready()
        now = time.monotonic()
        for worker in state.job.workers:
            worker.seen = now
            if worker.state == "expected" and worker.channels:
                worker.state = "active"  # it was here before the restart: its lease runs from now
        if self._publisher is not None:
            self._publisher.start()

    def _listen(self, *targets: Callable[[], None]) -> None:
        self._listener = self._transport.bind(self.config.endpoint)
        self._notify(f"parameter server {self.config.index} is listening on {self._listener.endpoint}")
        self._run(*targets)

    def _run(self, *targets: Callable[[], None]) -> None:
        for target in targets:
            name = f"parameter server {self.config.index} {target.__name__.strip('_')}"
            thread = OwnThread(target, name=name, say=self._notify, then=self._wake)
            self._threads.append(thread)
            thread.start()

    def _wake(self) -> None:
        """Ends the waits of the serving thread, for it to raise the failure of another."""
        job = self.state.job
        with job.changed:
            job.over.notify_all()
        if self._pair is not None:
            self._pair.wake()

    def _has_failed(self) -> bool:
        return any(thread.failure is not None for thread in self._threads)

    def _check_threads(self) -> None:
        for thread in self._threads:
            thread.check()
        if self._pair is not None:
            self._pair.check()

    def _recover(self) -> bool:
        """Recovers the state in the folder; returns whether nothing there was trained or prepared.

        Preparing ends with a snapshot and comes before all workers: a journal without a worker's change was cut short.
        """
        config = self.config
        state = self.state
        saved = False
        if config.folder is not None:
            for line in recover(config.folder, state, skips_damage=config.skips_damage):
                self._notify(f"parameter server {config.index}: {line}")
            saved = has_snapshot(config.folder)
        state.journal.open()
        if state.job.published.history and not state.job.published.on:
            state.begin_history("", "")  # what changes now is not noted
        state.evict_all()
        return not saved and not any(worker.channels for worker in state.job.workers)

    def wait_for_turn(self) -> bool:
        """Waits until this server serves workers; returns False where the job ends without it."""
        serves = self._pair is None or self._pair.wait_for_turn()
        self._check_threads()
        return serves

    def still_leads(self) -> bool:
        """Returns whether this server was not replaced by its standby."""
        return self._pair is None or self._pair.leader is not None

    def end_standby(self) -> None:
        """Tells the standby, if there is one, that the job is over."""
        if self._pair is not None:
            self._pair.end()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the job; returns whether it has ended.

        Raises:
            PSError: the server cannot continue.
        """
        job = self.state.job
        with job.changed:
            ended = job.over.wait_for(lambda: job.ended() or self._has_failed(), timeout_s)
        self._check_threads()
        if self.state.failure is not None:
            raise PSError(
                f"parameter server {self.config.index}: a change was journaled and could not be applied: "
                f"{self.state.failure!r}. Restart it; the journal restores its state."
            ) from self.state.failure
        return ended

    def finish_publishing(self) -> None:
        """Publishes the last rows, where rows are published; the workers are gone.

        Raises:
            PSError: the sink did not take them; the folder keeps them.
        """
        if self._publisher is not None:
            self.is_finishing = True
            try:
                self._publisher.finish()
            finally:
                self.is_finishing = False

    def stop(self) -> None:
        """Closes every connection and ends every thread; the folder keeps the state."""
        if self._stopping.is_set():
            return
        self._answer_the_last()
        self._stopping.set()
        if self._pair is not None:
            self._pair.stop()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            connections = dict(self._open)
        for connection in connections:
            connection.close()  # before the end is said: workers that wait go on with this server's next process
        job = self.state.job
        with job.changed:
            job.stop()
        self.state.late.send()
        for thread in (*self._threads, *connections.values()):
            thread.join(5.0)
        if self._publisher is not None:
            self._publisher.stop()
        self.state.journal.close()
        if self._folder_lock is not None:
            self._folder_lock.release()

    def _answer_the_last(self) -> None:
        """Gives the workers a moment to read the answers to their goodbyes."""
        deadline = time.monotonic() + 1.0
        while self._of_workers() and time.monotonic() < deadline and self.state.job.ended():
            time.sleep(0.01)

    def forget(self) -> None:
        """Removes snapshot and journal: the job is over."""
        if self.config.folder is not None:
            with self.state.snapshots:  # or a snapshot in progress would be left for the next job to find
                for path in (*self.config.folder.glob("*snapshot-*"), self.config.folder / "journal"):
                    shutil.rmtree(path, ignore_errors=True)
                for name in ("epoch.json", ".lock"):
                    (self.config.folder / name).unlink(missing_ok=True)

    def snapshot(self) -> None:
        """Writes a snapshot now, while the server keeps serving."""
        if self.config.folder is None:
            raise Refused("this parameter server has no folder to write a snapshot to.")
        with self._snapshotting:
            if not self._turn_over.is_set():
                write_snapshot(self.state, self.config.folder)

    # -- threads -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping.is_set():
            try:
                connection = self._listener.accept()
            except ConnectionLost:
                return
            with self._lock:
                reason = self._let_in(connection)
            if reason:
                self._complain(connection, reason)
                with suppress(PSError):
                    turn_away(connection, 0.0)
                connection.close()

    def _let_in(self, connection: Connection) -> str:
        """Gives a newcomer a thread, if need be by evicting an older one; returns why it gets none."""
        # Only connections without a proof give way: silent strangers cannot keep workers out.
        if len(self._newcomers) >= MAX_UNPROVEN or len(self._open) >= self._max_connections:
            evicted = self._newcomers.evict()
            if evicted is not None:
                self._open.pop(evicted, None)
                evicted.close()
        if len(self._open) >= self._max_connections:
            return (
                f"turned away: {self._max_connections} connections are open, which is the limit; raise "
                "FLEET_PS_MAX_CONNECTIONS, or add servers"
            )
        thread = OwnThread(self._serve, connection, name=f"connection of {connection.peer}", say=self._notify)
        try:
            thread.start()  # it waits for the lock before it leaves
        except RuntimeError as error:  # no more threads: the newcomer tries again
            return str(error)
        self._open[connection] = thread
        self._newcomers.add(connection)
        return ""

    def _complain(self, connection: Connection, reason: object) -> None:
        address = host_of(connection.peer)
        self._complaints.say(address, f"parameter server {self.config.index}: {connection.peer}: {reason}")

    def _of_workers(self) -> list[Connection]:
        with self._lock:
            return [one for one, thread in self._open.items() if thread not in self._not_workers]

    def _hang_up(self) -> None:
        for connection in self._of_workers():
            connection.close()

    def _watch(self) -> None:
        """Ends leases, and logs a summary now and then."""
        state = self.state
        config = self.config
        unsettled = False
        told = time.monotonic()
        job = state.job
        summary = Summary(self.state, told)
        while not self._stopping.wait(min(config.lease_s / 4, 1.0)):
            turn = Turn.LEADS if self._pair is None else self._pair.watch()
            if turn is Turn.REPLACED:
                self._step_back()
                return
            with job.changed:
                if turn is Turn.OVER:
                    job.stop()
                ranks = job.expire(time.monotonic())
            if ranks:
                self._notify(
                    f"parameter server {config.index}: workers {ranks} were silent for {config.lease_s} s; the others "
                    "no longer wait for them"
                )
            unsettled = unsettled or bool(ranks)
            if unsettled:
                try:
                    state.settle()
                    unsettled = False
                except Exception as error:  # for example a full disk: nobody else would try again
                    self._notify(f"parameter server {config.index}: the others cannot continue yet: {error}")
            if config.summary_interval_s is not None and time.monotonic() - told >= config.summary_interval_s:
                told = time.monotonic()
                line = summary.line(told)
                if line is not None:
                    self._notify(f"parameter server {config.index}: {line}")

    def _keep(self) -> None:
        """Writes snapshots when they are due; apart from _watch, because a large one takes minutes."""
        journal = self.state.journal
        config = self.config
        written = time.monotonic()
        interval_s = math.inf if config.snapshot_interval_s is None else config.snapshot_interval_s
        over = self._turn_over
        while config.folder is not None and not self._stopping.wait(min(config.lease_s / 4, 1.0)) and not over.is_set():
            lost = is_lost(config.folder, self.state)
            if lost:
                self._notify(
                    f"parameter server {config.index}: {config.folder} was removed. A snapshot goes into a new one; "
                    "until it is written, a restart of this server would find nothing"
                )
            if lost or time.monotonic() - written > interval_s or journal.bytes_written > config.snapshot_bytes:
                written = time.monotonic()
                try:
                    if self._folder_lock is not None:
                        self._folder_lock.renew()  # it may have been removed, too
                    self.snapshot()
                except Exception as error:
                    self._notify(f"parameter server {config.index}: no snapshot: {error}")
                    self._stopping.wait(10.0)  # the disk would fail again at once

    def _serve(self, connection: Connection) -> None:
        peer: ConnectedWorker | None = None
        try:
            secret = check_secret(self.endpoint, self.config.secret)
            sealed = prove_to_worker(connection, self.endpoint, secret, self.config.handshake_timeout_s)
            with self._lock:
                self._newcomers.discard(connection)
            peer = ConnectedWorker(sealed)
            self._answers.converse(peer, self._stopping.is_set, self._leave_workers)
        except (ConnectionLost, TransferTimeout):
            pass
        except FleetError as error:
            self._complain(connection, error)
        finally:
            connection.close()
            if peer is not None and peer.late is not None:
                self.state.late.drop(peer.late)
            with self._lock:
                self._open.pop(connection, None)
                self._newcomers.discard(connection)
                self._not_workers.discard(threading.current_thread())

    def _leave_workers(self) -> None:
        """Notes that the connection of this thread is no worker's: the end of the job does not wait for it."""
        with self._lock:
            self._not_workers.add(threading.current_thread())
