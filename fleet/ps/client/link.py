"""Link: one worker's line to one server. It survives cuts and restarts; no change is lost or applied twice.

[Note: What is sent again]
Requests go out in order and are answered in order; ``_pending`` holds those without an answer. Each answer to a change
says which number of the channel is durable on the server. An acknowledged change that is not durable yet moves to
``_replay``, where the server has a folder to restart from. When the line breaks::

    connect, prove the secret, say HELLO         the server answers with the last number it has applied
    send the newer changes of _replay            it acknowledged these and lost them in a restart
    send all that is in _pending                 it answers DUPLICATE where only the answer was lost

A server that comes back without the tables kept no state; the link then fails for good, as it does when a newer process
takes over the rank. ``_replay`` has a bound: at level 2 a change waits for the disk, at the others the oldest is given
up, and a line says so if the server comes back without it.

Threads take turns under ``lock``. Whoever holds it receives: the answer may be that of another thread's request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.errors import PSError
from fleet.ps.client.client_config import ONCE, ClientConfig
from fleet.ps.client.connector import Connector, HelloRefused, answer_limit_s
from fleet.ps.wire.auth import AuthenticationError
from fleet.ps.wire.messages import (
    Buffer,
    Header,
    MessageError,
    MessageFlag,
    Op,
    Status,
    asks_rows,
    decode_control,
    decode_header,
    encode_header,
)
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import ConnectionLost, PeerRefused, TransferTimeout, Transport

_LEAST_BEAT_S = 5.0  # a server that is only slow says so every 2 s


OnAnswer = Callable[[Header, memoryview], None]


@dataclass(slots=True, eq=False)
class Request:
    """One request, until it is answered."""

    op: Op
    buffers: list[Buffer] = field(default_factory=list)
    n_tables: int = 0
    step: int = 0
    seq: int = 0
    flags: int = MessageFlag.NONE
    change: bool = False  # has its own number and is applied once
    on_answer: OnAnswer | None = None
    tag: int = 0
    done: bool = False
    status: Status = Status.OK
    error: PSError | None = None

    @property
    def body_bytes(self) -> int:
        """The length of the body."""
        return sum(map(len, self.buffers))

    @property
    def asks_rows(self) -> bool:
        """Whether the answer may be large."""
        return asks_rows(self.op, self.flags)


class Link:
    """The line to one server; safe for several threads, which take turns.

    Args:
        config: the worker's side.
        index: the server's number in ``config.endpoints``.
        client_id: random number of this process.
        transport: how connections are made.
        notify: receives lines about a server that is away or waits.
    """

    def __init__(
        self, config: ClientConfig, index: int, client_id: int, transport: Transport, notify: Callable[[str], None]
    ) -> None:
        self.index = index
        self.welcome: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.last_used = 0.0
        self._config = config
        self._client_id = client_id
        self._connector = Connector(config, index, client_id, transport, notify)
        self._answer_limit_s = answer_limit_s(config)
        self._notify = notify
        # Called with the ranks that the server waits for, while this worker waits for its answer; may raise.
        self.look_after: Callable[[Sequence[int]], None] = lambda ranks: None
        self._absent: list[int] = []  # for whom the server waits, as it said last
        self._connection: Sealed | None = None
        self._in_memory: Request | None = None  # the last one whose body is in shared memory
        self._pending: deque[Request] = deque()
        self._replay: deque[Request] = deque()
        self._replay_bytes = 0
        self._next_seq = 1
        self._next_tag = 1
        self._acknowledged = self._durable = 0
        self._away_since: float | None = None
        self._said = 0.0
        self._dead: PSError | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, Any]:
        """Connects and returns the server's answer to HELLO."""
        with self.lock:
            self._ensure()
            return self.welcome

    def submit(self, request: Request) -> Request:
        """Sends ``request`` and returns it; :meth:`finish` waits for its answer.

        Raises:
            PSError: the server is away for longer than the deadline, or has refused this worker.
        """
        with self.lock:
            if request.body_bytes > self._config.max_body_bytes:
                raise PSError(
                    f"{self.name}: a message of {request.body_bytes} bytes; at most "
                    f"{self._config.max_body_bytes} are allowed. Send fewer rows at a time."
                )
            while any(waiting.asks_rows for waiting in self._pending):
                self._ensure()
                self._take_answer()  # or both sides might wait for the other to read
            if request.change:
                self._make_room()
            self._ensure()
            request.tag = self._take_tag()
            if request.change:
                request.seq = self._next_seq
                self._next_seq = self._next_seq + 1
            # Before it is sent: after a cut in the middle the reconnect sends all that is pending.
            self._pending.append(request)
            try:
                self._transmit(request)
            except (ConnectionLost, TransferTimeout) as error:
                self._lost(error)
                self._ensure()
            except BaseException:
                self._hang_up()
                raise
            return request

    def place(self, size: int) -> memoryview | None:
        """Returns where the next body lies, ``size`` bytes, if it need not be copied there.

        The caller holds :attr:`lock` until it has submitted that request.
        """
        if self._pending or self._connection is None:  # a request without an answer may be sent again from there
            return None
        return self._connection.place_in_memory(size)

    def finish(self, request: Request) -> Status:
        """Waits for the answer to ``request`` and returns its status.

        Raises:
            PSError: the server refused it, failed, or is away for longer than the deadline.
            FleetError: the server waits for a worker that does not come, see ``look_after``.
        """
        with self.lock:
            while not request.done:
                self._ensure()
                if not self._take_answer() and self._absent:
                    self.look_after(self._absent)
        if request.error is not None:
            raise request.error
        return request.status

    def call(self, request: Request) -> Status:
        """Sends ``request`` and waits for its answer."""
        return self.finish(self.submit(request))

    def beat(self, every_s: float) -> None:
        """Sends a sign of life if there was none for ``every_s`` seconds and no other thread uses the link."""
        # The thread that holds the lock talks to the server, which is a sign of life as well.
        if not self.lock.acquire(blocking=False):
            return
        limit_s = max(every_s, _LEAST_BEAT_S)  # the other servers must hear from this worker, too
        try:
            if self._connection is None and self._dead is None:
                self._connect()  # or the lease of a worker that computes for a long time would end
            elif self._connection is None or time.monotonic() - self.last_used < every_s:
                return
            while self._pending and self._connection is not None:
                if not self._take_answer(limit_s):
                    return  # a request in progress keeps the lease
            if self._connection is not None:
                ping = Request(Op.PING, tag=self._take_tag())
                self._pending.append(ping)
                self._transmit(ping)
                self._take_answer(limit_s)
                # The connection broke. The ping is dropped, because the next HELLO keeps the lease.
                if not ping.done and ping in self._pending:
                    self._pending.remove(ping)
        except PSError as error:
            self._lost(error)
        finally:
            self.lock.release()

    @property
    def name(self) -> str:
        """The server, for messages."""
        return self._connector.name

    @property
    def is_cut(self) -> bool:
        """Whether the server has ended the connection, which nobody has noticed yet."""
        connection = self._connection
        return connection is not None and connection.is_cut()

    @property
    def is_away(self) -> bool:
        """Whether there is no connection now."""
        return self._connection is None

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything acknowledged is durable; returns False when it is not within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self.lock:
            while self._pending:
                self._ensure()
                self._take_answer()
            while self._durable < self._acknowledged:
                if time.monotonic() > deadline:
                    return False
                # The answer to a request with a number says which change is durable.
                self.call(Request(Op.PING, seq=self._acknowledged))
                if self._durable < self._acknowledged:
                    time.sleep(0.005)
        return True

    def close(self) -> None:
        """Closes the connection; a thread that waits for the server to come back stops waiting."""
        # Before the lock: its holder may be waiting for the server, and looks at this in every round.
        self._dead = self._dead or PSError(f"{self.name}: this client is closed.")
        with self.lock:
            self._hang_up()

    # -- the line ------------------------------------------------------------------------------------------------

    def _take_tag(self) -> int:
        """Returns the number by which the next answer is recognised, of 32 bits and never 0."""
        tag = self._next_tag
        self._next_tag = tag % 0xFFFFFFFF + 1
        return tag

    def _transmit(self, request: Request) -> None:
        assert self._connection is not None
        size = request.body_bytes
        flags = request.flags
        # Each direction has one place in memory: the server reads the last body there until it has answered it.
        if (self._in_memory is None or self._in_memory.done) and self._connection.takes_in_memory(size):
            flags |= MessageFlag.IN_MEMORY
            self._in_memory = request
        header = Header(
            request.op,
            flags,
            self._client_id,
            request.seq,
            request.step,
            request.n_tables,
            Status.OK,
            size,
            request.tag,
        )
        self._connection.send(encode_header(header), request.buffers, self._config.answer_timeout_s)
        self.last_used = time.monotonic()

    def _take_answer(self, limit_s: float = math.inf) -> bool:
        """Receives one answer and hands it to the oldest request; returns False when the server says to wait.

        After a cut it only notes that the server is away.
        """
        began = time.monotonic()
        try:
            header, body = self._receive(limit_s)
        except (ConnectionLost, TransferTimeout, MessageError) as error:
            self._lost(error, began if isinstance(error, TransferTimeout) else None)
            self._say_away()  # it may have been silent for a long time
            return True
        except BaseException:
            self._hang_up()
            raise
        self._away_since = None
        request = self._pending[0]
        # Answers come in the order of the requests; after a mismatch only a new connection helps.
        if header.tag != request.tag or header.op != request.op:
            self._lost(MessageError(f"{self.name} answered {header.op.name} to {request.op.name}."))
            return True
        if header.status is Status.WAITING:
            self._say_waiting(decode_control(body))
            return False
        self._pending.popleft()
        self._acknowledge(request, header)
        request.status = header.status
        if header.status in (Status.OK, Status.DUPLICATE):
            try:
                if request.on_answer is not None:
                    request.on_answer(header, body)
            except MessageError as error:
                request.error = error
        else:
            text = decode_control(body).get("error", "no reason given")
            request.error = PSError(f"{self.name}: {text}")
            if header.status is Status.FENCED:
                self._dead = request.error
        request.done = True
        return True

    def _receive(self, limit_s: float = math.inf) -> tuple[Header, memoryview]:
        if self._connection is None:
            raise ConnectionLost(f"{self.name} is not connected.")
        limit = min(self._answer_limit_s, limit_s)
        header = decode_header(self._connection.receive_header(limit, limit), self._config.max_body_bytes)
        body = self._connection.body(header.body_bytes)
        self._connection.receive_body(body, limit)
        self.last_used = time.monotonic()
        return header, body

    def _acknowledge(self, request: Request, header: Header) -> None:
        if request.change and header.status in (Status.OK, Status.DUPLICATE):  # other answers: not applied
            self._acknowledged = max(self._acknowledged, request.seq)
            if self.welcome.get("keeps") and header.seq < request.seq:
                # Acknowledged but not durable: a restart of the server may lose it. The arrays belong to the caller,
                # who uses them again, so the bytes are copied. The values in the answer were used already.
                buffers: list[Buffer] = [bytes(buffer) for buffer in request.buffers]
                kept = replace(request, buffers=buffers, flags=request.flags & ~MessageFlag.VALUES, on_answer=None)
                if not self._replay or self._replay[-1].seq < request.seq:
                    self._replay.append(kept)
                    self._replay_bytes += kept.body_bytes
        if request.seq:
            self._durable = max(self._durable, header.seq)
        while self._replay and self._replay[0].seq <= self._durable:
            self._replay_bytes -= self._replay.popleft().body_bytes

    def _make_room(self) -> None:
        """Keeps the replay store within its bound: level 2 waits for the disk, level 0 drops the oldest."""
        while self._replay_bytes > self._config.replay_bytes and self._replay:
            if self.welcome.get("level", 0) >= 2 and self.flush(self._config.deadline_s):
                continue
            self._replay_bytes -= self._replay.popleft().body_bytes

    # -- reconnecting --------------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        """Closes the connection; after Ctrl-C in the middle of a message nothing else may be sent on it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, error: PSError, since: float | None = None) -> None:
        """Notes that the server is away since ``since``; raises when it has been away for longer than the deadline."""
        self._hang_up()
        if self._away_since is None:
            self._away_since = self._said = time.monotonic() if since is None else since
        elif self._dead is None and time.monotonic() - self._away_since > self._config.deadline_s:
            kept = " Its folder holds its state." if self.welcome.get("level") else ""
            raise PSError(
                f"{self.name} did not answer for {self._config.deadline_s:g} s; the last failure: {error} "
                f"Look at its log and restart it.{kept}"
            )

    def _ensure(self) -> None:
        """Connects where needed, and sends everything that is pending."""
        pause = 0.02
        while self._connection is None:
            if self._dead is not None:
                raise self._dead
            try:
                self._connect()
            except (AuthenticationError, PeerRefused) as error:
                self._connector.refusals += 1
                if self._connector.refusals >= 3:
                    raise
                self._lost(error)
            except (ConnectionLost, TransferTimeout, MessageError) as error:
                self._lost(error)
            else:
                self._connector.refusals = 0
                return
            self._say_away()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _connect(self) -> None:
        try:
            connection, answer = self._connector.connect(is_again=bool(self.welcome))
        except HelloRefused as error:
            self._dead = error
            raise
        self._connection = connection
        # The new connection shares other memory, in which no request lies yet.
        self._in_memory = None
        self.last_used = time.monotonic()
        try:
            self._resume(answer)
            for request in self._pending:
                self._transmit(request)
        except BaseException:
            self._hang_up()
            # The server may be at its other endpoint by now.
            self._connector.turn()
            raise

    def _resume(self, answer: dict[str, Any]) -> None:
        """Goes on from the last change that the server has, which is in its ``answer`` to HELLO."""
        first = not self.welcome
        lost = set(self.welcome.get("tables", ())) - set(answer["tables"])
        if lost:
            self._dead = PSError(
                f"{self.name} came back without tables {sorted(lost)}: it kept no state (journal level "
                f"{answer['level']}, or another folder). Restart the job from its last saved model."
            )
            raise self._dead
        self.welcome = answer
        if first:
            # On channels from ONCE on every process numbers its changes from 1.
            before = 0 if self._config.channel >= ONCE else answer["last"]
            self._next_seq = before + 1
            self._acknowledged = self._durable = before
            return
        self._queue_again(answer["last"])

    def _queue_again(self, last: int) -> None:
        """Queues the changes after ``last`` that were acknowledged and lost, ahead of the pending requests."""
        unanswered = {request.seq for request in self._pending if request.change}
        again = [request for request in self._replay if request.seq > last and request.seq not in unanswered]
        if self._acknowledged > last and len(again) < self._acknowledged - last:
            missing = self._acknowledged - last - len(again)
            self._notify(f"{self.name} came back without {missing} changes that are no longer kept here")
        for request in again:
            request.done = False
            request.tag = self._take_tag()
        self._pending.extendleft(reversed(again))

    def created(self, table_ids: set[int]) -> None:
        """Notes tables that the server must still have after a restart."""
        with self.lock:
            self.welcome["tables"] = sorted({*self.welcome.get("tables", ()), *table_ids})

    # -- lines ---------------------------------------------------------------------------------------------------

    def _say_away(self) -> None:
        now = time.monotonic()
        if now - self._said >= self._config.retry_interval_s:
            self._said = now
            away = now - (self._away_since or now)
            self._notify(f"server not ready, wait {self._config.retry_interval_s:g} sec to retry...")
            self._notify(f"not ready endpoints:{[self._connector.endpoint]}")
            self._notify(f"{self.name} is away for {away:.0f} s; giving up at {self._config.deadline_s:g} s")

    def _say_waiting(self, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        self._absent = [int(rank) for rank in fields.get("waiting_for") or ()]
        if fields.get("waiting_for") and now - self._said >= 10 * self._config.retry_interval_s:
            self._said = now
            self._notify(f"{self.name} waits for workers {fields['waiting_for']} at {fields.get('place')}")
