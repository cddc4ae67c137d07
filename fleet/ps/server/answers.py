"""Answers: reads the requests of a connection, answers each, and says which thread sends the answer.

All but the last worker's pushes of a sync step wait for it; [Note: Who answers a push of a step] in
:mod:`fleet.ps.server.late_answers` says who answers them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fleet.common.own_thread import OwnThread
from fleet.errors import CheckpointError, ConfigError, FleetError
from fleet.ps.one_machine.shared_bodies import LEAST_BYTES
from fleet.ps.server.connected_worker import ConnectedWorker
from fleet.ps.server.job_state import Fenced, Refused
from fleet.ps.server.late_answers import LateAnswer
from fleet.ps.server.operations import BEAT_S, Answer, Later, Operations
from fleet.ps.server.reader_requests import ReaderRequests, is_reader
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.standby.carried import Carried, send_piece
from fleet.ps.standby.pair import Pair
from fleet.ps.wire.messages import (
    MAX_CONTROL_BYTES,
    Header,
    MessageError,
    MessageFlag,
    Op,
    Status,
    asks_rows,
    control_body,
    decode_header,
    encode_header,
)
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import ConnectionLost, TransferTimeout

Said = TypeVar("Said")
_DATA = (Op.PULL, Op.PUSH, Op.ADD, Op.SET_DENSE, Op.GEO_PULL, Op.WATCH)
SIDE_BY_SIDE_BYTES = 4 << 20  # one thread writes so many values to other workers in about 0.3 ms


class Answers:
    """Answers requests on the connections of one server.

    Args:
        config: the server's configuration.
        operations: returns what answers workers now; a standby that takes over has other ones.
        readers: answers readers.
        pair: the server's part in its pair, if it has a standby or moves shards.
        notify: receives lines about what failed.
    """

    def __init__(
        self,
        config: ServerConfig,
        operations: Callable[[], Operations],
        readers: ReaderRequests,
        pair: Pair | None,
        notify: Callable[[str], None],
    ) -> None:
        self._config = config
        self._operations = operations
        self._readers = readers
        self._pair = pair
        self._notify = notify

    def converse(
        self, peer: ConnectedWorker, is_stopping: Callable[[], bool], leave_workers: Callable[[], None]
    ) -> None:
        """Answers the requests of a connection until it ends, or its peer must end.

        Args:
            peer: the connection, after both proofs.
            is_stopping: whether the server stops.
            leave_workers: called once the connection turns out not to be a worker's.

        Raises:
            ConnectionLost, TransferTimeout: the peer is gone.
            MessageError: it has sent no valid message, so nothing else on the connection can be trusted.
        """
        config = self._config
        connection = peer.connection
        limit = config.transfer_timeout_s
        idle = config.handshake_timeout_s  # a stranger must not hold a thread for as long as a worker may compute
        while not is_stopping():
            self._finish_last(peer)
            header = decode_header(connection.receive_header(limit, idle), config.max_body_bytes)
            if header.op not in _DATA and header.body_bytes > MAX_CONTROL_BYTES:
                raise MessageError(f"{connection.peer}: a {header.op.name} of {header.body_bytes} bytes.")
            is_first = peer.worker is None and not peer.reads
            if is_first and header.op not in (Op.HELLO, Op.FOLLOW):
                raise MessageError(f"{connection.peer}: the first message must be HELLO, not {header.op.name}.")
            body = connection.body(header.body_bytes)
            connection.receive_body(body, limit)
            if is_first and header.op is Op.FOLLOW:
                leave_workers()
                self._serve_follow(connection, body)
                return
            answer = self._give(peer, header, body)
            if peer.reads and header.op is Op.HELLO:
                leave_workers()
            if answer is not None and (answer.status is Status.FENCED or self._operations().state.failure is not None):
                return
            # Longer than the lease: a worker that was silent for one lease is expired, and may still go on with this
            # connection.
            idle = 2 * config.lease_s

    # -- inside --------------------------------------------------------------------------------------------------

    def _serve_follow(self, connection: Sealed, body: memoryview) -> None:
        if self._pair is not None:
            self._pair.serve(connection, body)
            return
        text = (
            f"parameter server {self._config.index} has no standby, and no other process that could serve it. Start "
            "the job with --server_standby or --server_shards."
        )
        send_piece(connection, Carried.REFUSED, [control_body({"error": text})])

    def _give(self, peer: ConnectedWorker, header: Header, body: memoryview) -> Answer | None:
        """Answers a request; returns the answer, or ``None`` where another thread will send it.

        Raises:
            ConnectionLost, TransferTimeout: the peer is gone.
        """
        answer = self._answer(peer, header, body)
        if isinstance(answer, Later):
            if self._leave(peer, header, answer):
                return None
            answer = self._told(header, answer.make)
        self._send(peer, header, answer)
        return answer

    def _finish_last(self, peer: ConnectedWorker) -> None:
        """Waits until the last push is answered and the worker speaks; a worker that waits is told for whom."""
        late = peer.late
        if late is None:
            return
        while not late.is_over() and not peer.connection.comes(BEAT_S):
            late.beat()
        if not late.is_over() and not peer.connection.is_cut():  # it did not wait for the answer
            while not late.is_over(BEAT_S):
                late.beat()
        if late.is_over():
            peer.late = None  # it has the gradients

    def _answer(self, peer: ConnectedWorker, header: Header, body: memoryview) -> Answer | Later:
        beat = partial(self._say_waiting, peer, header)

        def act() -> Answer | Later:
            if peer.reads or (header.op is Op.HELLO and is_reader(body)):
                return self._readers.answer(peer, header, body)
            if self._pair is not None and header.op is Op.HELLO:
                elsewhere = self._pair.greet(header, body)
                if elsewhere is not None:
                    return Answer(Status.REFUSED, [control_body(elsewhere)])
            answer = self._operations().answer(peer, header, body, beat)
            if self._pair is not None:
                if isinstance(answer, Later):
                    answer = answer.make()  # its step has to be with the standby, too
                self._pair.settle(header)
            return answer

        return self._told(header, act)

    def _told(self, header: Header, act: Callable[[], Said]) -> Said | Answer:
        """Returns what ``act`` returns, or an answer that says why it failed."""
        try:
            return act()
        except (ConnectionLost, TransferTimeout):
            raise
        except Fenced as error:
            return _error(Status.FENCED, error)
        except (Refused, MessageError, ConfigError, CheckpointError) as error:
            return _error(Status.REFUSED, error)
        except Exception as error:  # the worker is told; the server continues unless its state is in doubt
            self._notify(f"parameter server {self._config.index}: {header.op.name} failed: {error!r}")
            return _error(Status.FAILED, error)

    def _leave(self, peer: ConnectedWorker, header: Header, answer: Later) -> bool:
        """Leaves an answer to the thread that applies its step; returns False where this one has to wait and answer.

        So it is where the answer goes through a socket, whose worker may not read it, and where the answers are large:
        threads that write them side by side are done sooner then.
        """
        is_large = answer.size * (self._config.num_workers - 1) >= SIDE_BY_SIDE_BYTES
        if not peer.connection.shares_memory or peer.worker is None or is_large:
            return False

        def send() -> None:
            try:
                made = self._told(header, answer.make)
                if made.size <= LEAST_BYTES or _place_of(peer, made, header):
                    self._send(peer, header, made)
                else:
                    OwnThread(self._send_or_close, peer, header, made, name="answer", say=self._notify).start()
            except Exception as error:  # this thread has other workers to answer
                self._give_up(peer, error)

        late = LateAnswer(peer.worker, answer.step, send, lambda: self._say_waiting(peer, header, answer.account()))
        if not self._operations().state.late.add(late):
            return False
        peer.late = late
        return True

    def _say_waiting(self, peer: ConnectedWorker, header: Header, fields: dict[str, Any]) -> None:
        self._send(peer, header, Answer(Status.WAITING, [control_body(fields)]))

    def _send_or_close(self, peer: ConnectedWorker, header: Header, answer: Answer) -> None:
        try:
            self._send(peer, header, answer)
        except Exception as error:  # nobody else would close the connection
            self._give_up(peer, error)

    def _give_up(self, peer: ConnectedWorker, error: Exception) -> None:
        """Closes a connection from another thread than its own, which ends then."""
        if not isinstance(error, ConnectionLost | TransferTimeout):
            self._notify(f"parameter server {self._config.index}: an answer was not sent: {error!r}")
        peer.connection.close()

    def _send(self, peer: ConnectedWorker, header: Header, answer: Answer) -> None:
        state = self._operations().state
        durable = 0
        if peer.worker is not None:
            channel = peer.worker.channels.get(peer.channel)
            if channel is not None and header.seq:
                # ``durable_seq`` removes marks of the channel, to which other threads append under this lock.
                with state.journal.lock:
                    durable = channel.durable_seq(state.journal.durable_lsn)
        flags = MessageFlag.RESPONSE | answer.flags | _place_of(peer, answer, header)
        head = Header(
            header.op,
            flags,
            header.client_id,
            durable,
            state.job.applied_step if answer.step is None else answer.step,
            answer.n_tables,
            answer.status,
            answer.size,
            header.tag,
        )
        peer.connection.send(encode_header(head), answer.buffers, 10 * self._config.lease_s)


def _place_of(peer: ConnectedWorker, answer: Answer, header: Header) -> int:
    """Returns the flag of an answer that goes into memory: one with rows, see [Note: Memory of a connection]."""
    in_memory = asks_rows(header.op, header.flags) and peer.connection.takes_in_memory(answer.size)
    return MessageFlag.IN_MEMORY if in_memory else MessageFlag.NONE


def _error(status: Status, error: BaseException) -> Answer:
    text = str(error) if isinstance(error, FleetError) else repr(error)
    return Answer(status, [control_body({"error": text[:4000]})])
