"""Leader: a server that workers use, and the line that feeds its standby.

[Note: Which of two servers]
The promises of a server and of its standby must never count at the same time. An epoch decides: every worker process
keeps, per server, the highest epoch that it has seen, and says it in its HELLO. A server serves a connection only after
a HELLO with its own epoch, so every worker that it serves knows it. A server that hears a higher one steps down.

A promise to a worker (the number in each answer, up to which it forgets its changes) depends on the standby::

    the standby has joined      the server promises the records that the standby has confirmed
    its line breaks             nothing more is promised; the standby may come back, or may be promoted
    it stays away for GRACE_S   the server takes epoch + 1 and hangs up on all workers, so that they learn it. Once all
                                living workers have, it promises its own journal's records, and has no standby

The standby is promoted, to epoch + 2, when its line is broken, every worker that has not said goodbye asks for it at
the same time, none of them knows a higher epoch, and at least one knows this one. So both cannot happen: the server
goes alone only after all living workers know its new epoch, and any of them that asks stops the promotion. While a
worker's question to the standby waits, it answers no other server; if the standby dies during the question, the worker
never accepts epoch + 1 (:mod:`fleet.ps.client.fence`). A worker process that was started again knows no epoch, and its
voice alone promotes nobody.

The two then have changed places. The replaced server, started again, finds that the other leads, drops its rows and
follows (:class:`fleet.ps.standby.pair.Pair`). Once it has joined it is a standby like any other.

A server also hands over when it is told to (:meth:`Leader.hand_over`). Its journal takes no more records then, and the
standby is told to serve once it has the last one. It takes epoch + 2 as above, without a vote: one server decides.
A server that does not hear whether it was obeyed serves nobody until the standby says that it leads, or promises never
to obey.

Changes that were not promised are in the workers' hands, and go to the server that serves next; their numbers keep them
from being applied twice.

[Note: How a standby joins]
From some record on, the journal hands every record to the feed. Then a snapshot is written, its files are sent, and the
records after them. When the standby has confirmed everything that was promised before, it is told that it has joined:
only then can it be promoted. Rows that change without a record (a load, a save with modes 1 to 3) end the line: the
standby comes back for a new snapshot, and the answer to the worker waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import open_to_read
from fleet.errors import PSError
from fleet.ps.server.job_state import Refused
from fleet.ps.server.reader_requests import Readable
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.server.snapshot import write_snapshot
from fleet.ps.standby.carried import BEAT_S, LINE_S, Carried, send_fields, send_piece
from fleet.ps.standby.epoch_file import EpochFile
from fleet.ps.wire.messages import Buffer, Op, decode_header
from fleet.ps.wire.sealed import Sealed

GRACE_S = 3.0  # a standby that is away for longer is given up
_PIECE_BYTES = 4 << 20
_LINGER_S = 0.005  # records of this long travel together: fewer messages, fewer wake-ups
_FIRST_JOIN_S = 5.0  # the first workers wait this long for the standby to join
_MOST_QUEUED = 1 << 30  # bytes that a standby may be behind
_STUCK_S = 30.0  # a line on which nothing was confirmed for this long is given up
_SWITCH_S = 10.0  # a standby that has not taken over within this time is asked to leave it
_POLL_S = 0.01


class Leader:
    """The server's side of the pair; its state changes under the journal's lock.

    Args:
        config: of the server, with its standby as ``peer``.
        state: of the server.
        epoch: the number in the server's folder.
        hang_up: ends the connections of all workers.
        notify: receives each line meant for the user.
        has_standby: False for a standby that was promoted: the other server is not back as its standby yet.
    """

    def __init__(
        self,
        config: ServerConfig,
        state: ServerState,
        epoch: EpochFile,
        hang_up: Callable[[], None],
        notify: Callable[[str], None],
        *,
        has_standby: bool = True,
    ) -> None:
        self._config = config
        self._state = state
        self._epoch = epoch
        self._hang_up = hang_up
        self._notify = notify
        self.peer = config.peer  # the endpoint of the standby
        self._journal = state.journal
        self._moved = threading.Condition(self._journal.lock)
        self._feed: _Feed | None = None
        self._proven: set[tuple[int, int]] = set()  # rank and process that know the epoch
        self._since = time.monotonic()  # since when there is no standby
        self.alone = not has_standby
        self.deposed = self._leaves = self._ends = False
        self.joined = self._joined_once = False
        if has_standby:
            self._journal.confirmed = self._journal.last_lsn

    @property
    def epoch(self) -> int:
        """The epoch of this server."""
        return self._epoch.epoch

    # -- workers -------------------------------------------------------------------------------------------------

    def greet(self, rank: int, client_id: int, known: int) -> dict[str, Any] | None:
        """Returns the answer to a HELLO instead of a welcome; None: the worker knows the epoch."""
        if known > self.epoch:
            self.step_down(f"the standby at {self.peer} has taken over (epoch {known})")
        if self.deposed:
            return {"standby": "another server has taken over"}
        if self._leaves:
            return {"standby": "it hands over to the other one of its pair"}
        if known < self.epoch:
            # The worker learns the epoch and greets again: a server serves only workers that know its epoch.
            return {"epoch": self.epoch}
        # A job that starts gives its standby a moment, so that its first promises already have two copies.
        with self._moved:
            self._moved.wait_for(lambda: self._joined_once or self.alone or self._is_over(), _FIRST_JOIN_S)
            self._proven.add((rank, client_id))
            self._promise()
        self.settle()
        return None

    def step_down(self, reason: str) -> None:
        """Ends serving: the rows that count are on another server."""
        with self._journal.lock:
            first = not self.deposed
            self.deposed = True
            self._journal.confirmed = 0  # nothing more is promised
            if self._feed is not None:
                self._feed.close("this server has stepped down")
        if first:
            self._say(f"{reason}; this server steps down")
            self._hang_up()

    def hand_over(self, ask: Callable[[bool], dict[str, Any] | None]) -> None:
        """Lets the standby serve from now on; nothing is lost, and this server serves no worker afterwards.

        Args:
            ask: returns the other server's standing, None while it is away; with True it may not take over any more.

        Raises:
            Refused: no standby can take over; this server goes on.
        """
        with self._moved:
            feed = self._feed
            if feed is None or not self.joined or self._leaves or self._is_over():
                why = (
                    f"{self.peer} has not joined it. Start it, and wait for the line that it follows"
                    if self.peer
                    else "nobody follows it. Shards of --server_shards move by python -m fleet.ps scale"
                )
                raise Refused(f"parameter server {self._config.index} has no standby that could take over: {why}.")
            self._leaves = self._journal.handed_over = True
        # No record is added from here on, so the order to take over is the last thing on the line.
        self._hang_up()
        feed.hand_over()
        if not self._has_left(ask):
            with self._moved:
                self._leaves = self._journal.handed_over = False
            raise Refused(
                f"parameter server {self._config.index}: {self.peer} was lost before it took over; this server goes on."
            )
        self.step_down(f"the standby at {self.peer} has taken over (epoch {self.epoch + 2})")

    def _has_left(self, ask: Callable[[bool], dict[str, Any] | None]) -> bool:
        """Returns whether the standby leads; waits until that is certain."""
        began = reported = time.monotonic()
        while not self._state.job.stopped:
            now = time.monotonic()
            # Once the line is lost or late, the order may or may not have arrived: only the standby's word decides.
            other = ask(now - began > _SWITCH_S or self._feed is None)
            if other is not None and other["leads"]:
                return True
            if other is not None and other.get("stays"):
                return False
            if now - reported > 3.0:
                reported = now
                self._say(f"waits for {self.peer} to take over ({now - began:.0f} s); nobody serves meanwhile")
            time.sleep(_POLL_S)
        return True

    def _promise(self) -> None:
        """Relies on the own journal once every living worker knows the epoch; the lock is held."""
        if self.alone and not self.deposed and self._journal.confirmed is not None:
            living = {(w.rank, w.client_id) for w in self._state.job.workers if w.state == "active"}
            if self._proven and living <= self._proven:
                self._journal.confirmed = None

    def settle(self) -> None:
        """Waits until the standby has every record so far, or is given up."""
        with self._moved:
            lsn = self._journal.last_lsn
            self._moved.wait_for(lambda: not self.joined or (self._journal.confirmed or 0) >= lsn)

    def readable(self) -> Readable | str:
        """Returns the state for readers, or the reason why there is no state to read."""
        if self.deposed:
            return "another server has taken over"
        last = self._journal.last_lsn
        confirmed = self._journal.confirmed
        kept = last if confirmed is None else min(confirmed, last)
        return Readable(self._state, self.epoch, last, kept, confirm=self._confirm)

    def _confirm(self, record: int, limit_s: float) -> bool:
        """Returns whether a failover keeps the records up to ``record``, for which it waits a while."""
        deadline = time.monotonic() + limit_s
        with self._moved:
            while (confirmed := self._journal.confirmed) is not None and confirmed < record:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_over():
                    return False
                self._moved.wait(min(left, 10 * _POLL_S))
            return not self.deposed

    def renew(self) -> None:
        """Gives the standby a new snapshot, because rows have changed without a record; returns when it has it."""
        with self._moved:
            feed = self._feed
            if feed is None:
                return
            feed.close("rows have changed without a record")
            self._moved.wait_for(lambda: self.alone or self._is_over() or self._has_joined_after(feed))

    def _is_over(self) -> bool:
        return self.deposed or self._state.job.stopped

    def _has_joined_after(self, feed: _Feed) -> bool:
        return self._feed is not None and self._feed is not feed and self.joined

    # -- the standby ---------------------------------------------------------------------------------------------

    def standing(self) -> dict[str, Any]:
        """Returns the standing of this server, as the other one of the pair reads it."""
        return {"epoch": self.epoch, "leads": True, "joined": False, "deposed": self.deposed}

    def serve(self, line: Sealed, asked: dict[str, Any]) -> None:
        """Serves one FOLLOW to its end, in the thread of its connection."""
        if asked.get("probe") or self.deposed:
            send_fields(line, self.standing())
            return
        feed = _Feed(line)
        self.peer = str(asked.get("at") or self.peer)
        with self._moved:
            if self._feed is not None:
                self._feed.close("the standby connected again")
            self._feed = feed
            self.joined = False
            # From here on promises wait for this standby, except those that the own journal has already given.
            if self._journal.confirmed is None:
                self._journal.confirmed = self._journal.last_lsn
            self._journal.tap = feed.put
        # In a thread of its own: the standby confirms records while this thread sends.
        end = partial(feed.close, "its answers cannot be read")
        OwnThread(self._read_acks, feed, name="standby", say=self._say, then=end).start()
        try:
            self._stream(feed)
        except Exception as error:  # the snapshot may fail as well: the server goes on
            feed.close(str(error))
        finally:
            self._lost(feed)

    def _stream(self, feed: _Feed) -> None:
        line = feed.line
        send_fields(line, self.standing())
        if self._ends:
            feed.finish_now()
            return
        assert self._config.folder is not None
        feed.send_snapshot(write_snapshot(self._state, self._config.folder))
        with self._moved:
            feed.due = self._journal.last_lsn  # the rows of the snapshot hold at most these
        self._say(f"its standby at {self.peer} has a snapshot and follows")
        joined = False
        while not feed.reason:
            feed.send_queued()
            if feed.confirmed >= feed.due and not joined:
                joined = True
                self._join(feed)
            if time.monotonic() - feed.heard > _STUCK_S:
                feed.close(f"it confirmed nothing for {_STUCK_S:g} s")

    def _join(self, feed: _Feed) -> None:
        # Told first: a promise that needs the standby may be given only after it knows that it can be promoted.
        send_piece(feed.line, Carried.JOINED, seq=self.epoch)
        with self._moved:
            if self._feed is feed:
                self.joined = True
                self.alone = False
                self._joined_once = True
                self._journal.confirmed = feed.confirmed
                self._moved.notify_all()

    def _read_acks(self, feed: _Feed) -> None:
        try:
            while not feed.reason:
                header = decode_header(feed.line.receive_header(LINE_S, 10 * LINE_S))
                feed.line.receive_body(memoryview(b""))
                if header.op is not Op.FOLLOW:
                    raise PSError(f"the standby sent {header.op.name}.")
                feed.heard = time.monotonic()
                with self._moved:
                    # A standby between two states confirms 0, see Follower._next_confirmed().
                    feed.confirmed = max(feed.confirmed, header.seq)
                    if self._feed is feed and self.joined:
                        self._journal.confirmed = feed.confirmed
                        self._moved.notify_all()
        except PSError as error:
            feed.close(str(error))

    def _lost(self, feed: _Feed) -> None:
        with self._moved:
            # A standby that has connected again has another feed by now, which goes on.
            if self._feed is feed:
                self._feed = None
                self.joined = False
                self._since = time.monotonic()
                self._journal.tap = None
            self._moved.notify_all()
        feed.line.close()
        if not self._state.job.stopped and not self._leaves:
            self._say(f"the line to its standby at {self.peer} broke: {feed.reason}")

    @property
    def lacks_standby(self) -> bool:
        """Whether there is no line to a standby now."""
        return self._feed is None

    def watch(self) -> None:
        """Gives up a standby that stays away; called now and then."""
        with self._moved:
            away = self._feed is None and not self.alone and not self.deposed and not self._leaves
            due = away and time.monotonic() - self._since > GRACE_S
            self._promise()
            feed = self._feed if self.joined else None
        if due:
            self.go_alone()
        if feed is not None and feed.is_newly_silent():
            self._say(
                f"its standby at {self.peer} is silent for {LINE_S:g} s; what workers wait for waits for it, "
                f"{_STUCK_S + GRACE_S:g} s at most"
            )

    def go_alone(self) -> None:
        """Takes the next epoch, without a standby."""
        # On the disk first: after a restart the workers know this epoch, and the server must, too.
        self._epoch.write(self.epoch + 1, leads=True)
        with self._moved:
            self.alone = True
            self.joined = False
            self._proven.clear()
            self._promise()
            self._moved.notify_all()
        self._say(
            f"its standby at {self.peer} is away: this server goes on alone (epoch {self.epoch}), and what it "
            "has is lost with its folder until the standby is back"
        )
        # The workers come back with a HELLO, in which they learn the new epoch.
        self._hang_up()

    def end(self) -> None:
        """Tells the standby that the job is over, even if it asks only later."""
        with self._moved:
            self._ends = True
            feed = self._feed
        if feed is not None:
            feed.finish()

    def forget_job(self) -> None:
        """Ends this server, which has stepped down: the job is over."""
        job = self._state.job
        with job.changed:
            job.stop()

    def close(self) -> None:
        """Ends the line to the standby, and every wait for the standby."""
        with self._moved:
            if self._feed is not None:
                self._feed.close("this server ends")
            self.joined = False
            self._moved.notify_all()

    def _say(self, line: str) -> None:
        self._notify(f"parameter server {self._config.index}: {line}")


class _Feed:
    """One line to a standby: the records that wait for it, and the last one that it has confirmed."""

    def __init__(self, line: Sealed) -> None:
        self.line = line
        self.confirmed = 0
        self.due = 0
        self.heard = time.monotonic()
        self.reason = ""  # why it has ended
        self._was_silent = False
        self._queue: list[bytes] = []
        self._queued = 0
        self._some = threading.Condition()
        self._finishing = self._leaving = False
        self._finished = threading.Event()

    def is_newly_silent(self) -> bool:
        """Returns True once when nothing has come from the standby for LINE_S, and again after it was back."""
        before = self._was_silent
        self._was_silent = time.monotonic() - self.heard > LINE_S
        return self._was_silent and not before

    def put(self, buffers: list[Buffer]) -> None:
        """Queues a record; the journal's lock is held."""
        # Copies, because the record is sent later than its request is answered.
        data = [bytes(buffer) for buffer in buffers]
        with self._some:
            self._queue += data
            self._queued += sum(map(len, data))
            if self._queued > _MOST_QUEUED and not self.reason:
                self.reason = f"it is {self._queued >> 20} MiB behind"
            if len(self._queue) == len(data):  # it was empty, so the sender may sleep
                self._some.notify()

    def send_queued(self) -> None:
        """Sends the waiting records, or a beat when none comes within BEAT_S."""
        with self._some:
            if not self._queue and not self._finishing and not self._leaving:
                self._some.wait(BEAT_S)
        if self._queue and not self._finishing:
            time.sleep(_LINGER_S)
        with self._some:
            waiting = self._queue
            self._queue = []
            self._queued = 0
        kind = Carried.RECORDS if waiting else Carried.BEAT
        for batch in _batches(waiting) if waiting else [[]]:
            send_piece(self.line, kind, batch, timeout_s=10 * LINE_S)
        if self._leaving and not self._queue:
            send_piece(self.line, Carried.TAKE_OVER)
            self._leaving = False
        if self._finishing and not self._queue:
            self.finish_now()

    def send_snapshot(self, path: Path) -> None:
        """Sends the files of a snapshot, which may be removed while they are sent."""
        # All files are opened before the first is sent: a newer snapshot removes this one.
        with ExitStack() as stack:
            files = [(file.name, stack.enter_context(open_to_read(file))) for file in sorted(path.iterdir())]
            for name, file in files:
                head = len(name.encode()).to_bytes(2, "big") + name.encode()
                while piece := file.read(_PIECE_BYTES):
                    send_piece(self.line, Carried.FILE, [head, piece], timeout_s=10 * LINE_S)
                    self.heard = time.monotonic()
        send_piece(self.line, Carried.SNAPSHOT, [path.name.encode()])

    def hand_over(self) -> None:
        """Sends the waiting records and the order to take over; no record is put after them."""
        with self._some:
            self._leaving = True
            self._some.notify()

    def finish(self) -> None:
        """Sends the waiting records and the end of the job."""
        with self._some:
            self._finishing = True
            self._some.notify()
        # The wait is bounded: a standby that hangs must not keep this server from ending.
        self._finished.wait(LINE_S)

    def finish_now(self) -> None:
        """Sends the end of the job and drops the waiting records; only the sending thread calls it."""
        send_piece(self.line, Carried.END)
        self._finished.set()
        self.close("the job is over")

    def close(self, reason: str) -> None:
        """Ends the line."""
        with self._some:
            self.reason = self.reason or reason
            self._some.notify()
        with suppress(PSError):
            self.line.close()


def _batches(data: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for item in data:
        batch.append(item)
        size += len(item)
        if size > _PIECE_BYTES and len(batch) % 2 == 0:  # head and body stay together
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
