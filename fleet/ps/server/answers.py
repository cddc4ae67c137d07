"""Answers: what a server says to a worker or reader after each of its requests, and which thread says it.

All but the last worker's pushes of a sync step wait for it; [Note: Who answers a push of a step] in
:mod:`fleet.ps.server.late_answers` says who answers them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fleet.errors import CheckpointError, ConfigError, FleetError
from fleet.ps.server.connected_worker import Answer, ConnectedWorker
from fleet.ps.server.job_state import Fenced, Refused
from fleet.ps.server.late_answers import LateAnswer
from fleet.ps.server.operations import BEAT_S, Later, Operations
from fleet.ps.server.reader_requests import ReaderRequests, is_reader
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.standby.pair import Pair
from fleet.ps.wire.messages import Header, MessageError, MessageFlag, Op, Status, control_body, encode_header
from fleet.ps.wire.shared_bodies import LEAST_BYTES
from fleet.ps.wire.transport import ConnectionLost, TransferTimeout

Said = TypeVar("Said")
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

    def give(self, peer: ConnectedWorker, header: Header, body: memoryview) -> Answer | None:
        """Answers a request; returns what was said, or ``None`` where another thread will answer.

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

    def finish_last(self, peer: ConnectedWorker) -> None:
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

    # -- inside --------------------------------------------------------------------------------------------------

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
                if made.size <= LEAST_BYTES or peer.place_of(made, header):
                    self._send(peer, header, made)
                else:
                    threading.Thread(target=self._send_or_close, args=(peer, header, made), daemon=True).start()
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
                with state.journal.lock:
                    durable = channel.durable_seq(state.journal.durable_lsn)
        flags = MessageFlag.RESPONSE | answer.flags | peer.place_of(answer, header)
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


def _error(status: Status, error: BaseException) -> Answer:
    text = str(error) if isinstance(error, FleetError) else repr(error)
    return Answer(status, [control_body({"error": text[:4000]})])
