"""Link: one worker's line to one server. It survives cuts and restarts; no change is lost or applied twice.

[Note: What is sent again]
Requests go out in order and are answered in order; ``_pending`` holds those without an answer. Each answer to a change
says which number of the channel is durable on the server. An acknowledged change that is not durable yet moves to
``_replay``, where the server has a folder to restart from. When the line breaks::

    connect, prove the secret, say HELLO         the server answers with the last number it has applied
    send what is newer in _replay                changes that it acknowledged and lost in a restart
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
from dataclasses import replace
from typing import Any

from fleet.errors import PSError
from fleet.ps.client.client_config import ONCE, ClientConfig
from fleet.ps.client.request import Request
from fleet.ps.wire.auth import AuthenticationError, check_secret, prove_to_server
from fleet.ps.wire.memory_file import NotShared
from fleet.ps.wire.messages import (
    Buffer,
    Header,
    MessageError,
    MessageFlag,
    Op,
    Status,
    control_body,
    decode_control,
    decode_header,
    encode_header,
)
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.shared_bodies import SharedBodies
from fleet.ps.wire.transport import ConnectionLost, PeerRefused, TransferTimeout, Transport

_LEAST_BEAT_S, _LEAST_LIMIT_S = 5.0, 10.0  # a server that is only slow says so every 2 s
_LEAST_PATIENCE_S = 0.3  # for a greeting, where there is a standby to turn to; it grows


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
        self.endpoint = config.endpoints[index]
        self.index = index
        self.name = f"parameter server {index} ({self.endpoint})"
        self.welcome: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.last_used = 0.0
        self._config = config
        self._endpoints = [self.endpoint, *config.others(index)]
        self._patience_s = config.connect_timeout_s if len(self._endpoints) == 1 else _LEAST_PATIENCE_S
        self._client_id = client_id
        self._transport = transport
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
        self._told_not_shared = False
        self._away_since: float | None = None
        self._refusals = 0
        self._said = 0.0
        self._dead: PSError | None = None
        self._body = bytearray(1 << 16)

    # -- requests ------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, Any]:
        """Connects and returns what the server said."""
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
            request.tag, self._next_tag = self._next_tag, self._next_tag % 0xFFFFFFFF + 1
            if request.change:
                request.seq, self._next_seq = self._next_seq, self._next_seq + 1
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
                ping = Request(Op.PING, tag=self._next_tag)
                self._next_tag = self._next_tag % 0xFFFFFFFF + 1
                self._pending.append(ping)
                self._transmit(ping)
                self._take_answer(limit_s)
                if not ping.done and ping in self._pending:
                    self._pending.remove(ping)
        except PSError as error:
            self._lost(error)
        finally:
            self.lock.release()

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
                self.call(Request(Op.PING, seq=self._acknowledged))
                if self._durable < self._acknowledged:
                    time.sleep(0.005)
        return True

    def close(self) -> None:
        """Closes the connection."""
        with self.lock:
            self._hang_up()
            self._dead = self._dead or PSError(f"{self.name}: this client is closed.")

    # -- the line ------------------------------------------------------------------------------------------------

    def _transmit(self, request: Request) -> None:
        assert self._connection is not None
        size = request.body_bytes
        flags = request.flags
        if (self._in_memory is None or self._in_memory.done) and self._connection.takes_in_memory(size):
            flags |= MessageFlag.IN_MEMORY
            self._in_memory = request
        tables, tag = request.n_tables, request.tag
        header = Header(request.op, flags, self._client_id, request.seq, request.step, tables, Status.OK, size, tag)
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
        limit = min(self._config.answer_timeout_s, max(self._config.deadline_s / 4, _LEAST_LIMIT_S), limit_s)
        header = decode_header(self._connection.receive_header(limit, limit), self._config.max_body_bytes)
        body = self._connection.body_in_memory(header.body_bytes)
        if body is None:
            if header.body_bytes > len(self._body):
                self._body = bytearray(header.body_bytes + header.body_bytes // 4)
            body = memoryview(self._body)[: header.body_bytes]
        self._connection.receive_body(body, limit)
        self.last_used = time.monotonic()
        return header, body

    def _acknowledge(self, request: Request, header: Header) -> None:
        if request.change and header.status in (Status.OK, Status.DUPLICATE):  # other answers: not applied
            self._acknowledged = max(self._acknowledged, request.seq)
            if self.welcome.get("keeps") and header.seq < request.seq:
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
            raise PSError(
                f"{self.name} did not answer for {self._config.deadline_s:g} s; the last failure: {error} "
                "Look at its log and restart it; its folder holds its state."
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
                self._refusals += 1
                if self._refusals >= 3:
                    raise
                self._lost(error)
            except (ConnectionLost, TransferTimeout, MessageError) as error:
                self._lost(error)
            else:
                self._refusals = 0
                return
            self._say_away()
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _connect(self) -> None:
        config = self._config
        secret = check_secret(self.endpoint, config.secret)
        connection = None
        try:
            connection = self._transport.connect(self.endpoint, self._patience_s)
            self._connection = prove_to_server(connection, self.endpoint, secret, self._patience_s)
            self._in_memory = None
            self._greet()
            for request in self._pending:
                self._transmit(request)
        except BaseException:
            self._connection = None
            if connection is not None:
                connection.close()
            self._turn()
            raise
        self._patience_s = min(self._patience_s, config.connect_timeout_s)

    def _turn(self) -> None:
        """Turns to the next endpoint where the server may be; where there is one alone, to the same."""
        at = (self._endpoints.index(self.endpoint) + 1) % len(self._endpoints)
        self.endpoint = self._endpoints[at]
        self.name = f"parameter server {self.index} ({self.endpoint})"
        self._patience_s = min(1.5 * self._patience_s, self._config.connect_timeout_s)

    def _greet(self) -> None:
        config = self._config
        fields: dict[str, Any] = {"rank": config.rank, "channel": config.channel}
        fields.update(num_workers=config.num_workers, job=config.job)
        if config.deputy:
            fields["deputy"] = "keep" if self.welcome else "take"
        memory, offered = self._offer_memory()
        fields.update(offered)
        header, answer = self._agree(fields) if config.has_others else self._say_hello(fields)
        if header.op is not Op.HELLO or header.status is not Status.OK:
            self._dead = PSError(f"{self.name}: {answer.get('error', 'it did not greet back')}")
            raise self._dead
        first = not self.welcome
        lost = set(self.welcome.get("tables", ())) - set(answer["tables"])
        if lost:
            self._dead = PSError(
                f"{self.name} came back without tables {sorted(lost)}: it kept no state (journal level "
                f"{answer['level']}, or another folder). Restart the job from its last saved model."
            )
            raise self._dead
        self.welcome = answer
        self._take_memory(memory, answer)
        if first:
            before = 0 if config.channel >= ONCE else answer["last"]
            self._next_seq = before + 1
            self._acknowledged = self._durable = before
            return
        self._queue_again(answer["last"])

    def _offer_memory(self) -> tuple[SharedBodies | None, dict[str, Any]]:
        """Returns memory for a server that may be on this machine, and the field of HELLO that offers it."""
        assert self._connection is not None
        if not (self._config.shares_memory and self._connection.is_here):
            return None, {}
        try:
            memory, place = SharedBodies.make()
        except NotShared as error:
            self._say_not_shared(error)
            return None, {}
        return memory, {"memory": place}

    def _take_memory(self, memory: SharedBodies | None, answer: dict[str, Any]) -> None:
        if memory is None or self._connection is None:
            return
        memory.seal_off()
        if answer.get("memory") is True:
            self._connection.share(memory)
        else:
            self._say_not_shared(answer.get("memory"))

    def _say_not_shared(self, reason: object) -> None:
        if not self._config.channel and not self._told_not_shared:
            self._told_not_shared = True
            self._notify(
                f"{self.name} is on this machine and shares no memory with this worker: {reason} What is large goes "
                "through the socket, which takes more processor time. FLEET_PS_SHARED_MEMORY=0 omits this line"
            )

    def _say_hello(self, fields: dict[str, Any]) -> tuple[Header, dict[str, Any]]:
        self._transmit(Request(Op.HELLO, [control_body(fields)]))
        header, body = self._receive()
        return header, decode_control(body)

    def _agree(self, fields: dict[str, Any]) -> tuple[Header, dict[str, Any]]:
        """Says hello until both sides know the same epoch, see [Note: Which of two servers]."""
        fence = self._config.fences.of(self.index)
        with fence.lock:
            while True:
                # A shard that moves is not promoted by questions.
                is_other = self.endpoint != (fence.leader or self._endpoints[0])
                asks_standby = bool(self._config.standbys) and is_other and fence.epoch > 0
                if asks_standby:
                    fence.bound = fence.epoch  # until it answers: it may be promoted by this question
                header, answer = self._say_hello({**fields, "epoch": fence.epoch})
                if asks_standby:
                    fence.bound = None
                self._refusals = 0
                if "standby" in answer:
                    raise ConnectionLost(f"{self.name} does not serve: {answer['standby']}.")
                known = answer.get("epoch")
                if known is not None and (int(known) <= fence.epoch or not fence.learn(int(known))):
                    raise ConnectionLost(f"{self.name} may have been replaced by its standby.")
                fence.leader = self.endpoint
                if known is None:
                    return header, answer

    def _queue_again(self, last: int) -> None:
        """Queues the changes after ``last`` that were acknowledged and lost, ahead of the pending requests."""
        unanswered = {request.seq for request in self._pending if request.change}
        again = [request for request in self._replay if request.seq > last and request.seq not in unanswered]
        if self._acknowledged > last and len(again) < self._acknowledged - last:
            missing = self._acknowledged - last - len(again)
            self._notify(f"{self.name} came back without {missing} changes that are no longer kept here")
        for request in again:
            request.done = False
            request.tag, self._next_tag = self._next_tag, self._next_tag % 0xFFFFFFFF + 1
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
            self._notify(f"not ready endpoints:{[self.endpoint]}")
            self._notify(f"{self.name} is away for {away:.0f} s; giving up at {self._config.deadline_s:g} s")

    def _say_waiting(self, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        self._absent = [int(rank) for rank in fields.get("waiting_for") or ()]
        if fields.get("waiting_for") and now - self._said >= 10 * self._config.retry_interval_s:
            self._said = now
            self._notify(f"{self.name} waits for workers {fields['waiting_for']} at {fields.get('place')}")
