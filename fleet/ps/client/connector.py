"""Connector: brings a worker to a proven connection with one server, at the endpoint where that serves now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet.errors import PSError
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.one_machine.memory_file import NotShared
from fleet.ps.wire.auth import check_secret, prove_to_server
from fleet.ps.wire.messages import (
    Header,
    Op,
    Status,
    control_body,
    decode_control,
    decode_header,
    encode_header,
)
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import ConnectionLost, Transport

_LEAST_LIMIT_S = 10.0  # a server that is only slow says so every 2 s
_LEAST_PATIENCE_S = 0.3  # for a greeting, where there is a standby to turn to; it grows


class HelloRefused(PSError):
    """The server has refused this worker; another attempt would be refused, too."""


def answer_limit_s(config: ClientConfig) -> float:
    """Returns for how long a server may say nothing before the worker connects anew."""
    return min(config.answer_timeout_s, max(config.deadline_s / 4, _LEAST_LIMIT_S))


class Connector:
    """Connects one worker to one server.

    Args:
        config: the worker's side.
        index: the server's number in ``config.endpoints``.
        client_id: random number of this process.
        transport: how connections are made.
        notify: receives lines meant for the user.

    Attributes:
        endpoint: where the server is looked for now.
        refusals: how often in a row the proofs have failed.
    """

    def __init__(
        self, config: ClientConfig, index: int, client_id: int, transport: Transport, notify: Callable[[str], None]
    ) -> None:
        self.endpoint = config.endpoints[index]
        self.refusals = 0
        self._config = config
        self._index = index
        self._client_id = client_id
        self._transport = transport
        self._notify = notify
        self._endpoints = [self.endpoint, *config.others(index)]
        self._patience_s = config.connect_timeout_s if len(self._endpoints) == 1 else _LEAST_PATIENCE_S
        self._told_not_shared = False

    @property
    def name(self) -> str:
        """The server, for messages."""
        return f"parameter server {self._index} ({self.endpoint})"

    def connect(self, *, is_again: bool) -> tuple[Sealed, dict[str, Any]]:
        """Returns a connection, and the server's answer to HELLO; after a failure it turns to the next endpoint.

        Args:
            is_again: this process was connected to the server before.

        Raises:
            ConnectionLost, TransferTimeout, MessageError: no server answers there now.
            AuthenticationError, PeerRefused: the proofs failed.
            HelloRefused: the server has another job, or a newer process has the rank.
        """
        secret = check_secret(self.endpoint, self._config.secret)
        stream = None
        try:
            stream = self._transport.connect(self.endpoint, self._patience_s)
            connection = prove_to_server(stream, self.endpoint, secret, self._patience_s)
            answer = self._greet(connection, is_again)
        except BaseException:
            if stream is not None:
                stream.close()
            self.turn()
            raise
        self._patience_s = min(self._patience_s, self._config.connect_timeout_s)
        return connection, answer

    def turn(self) -> None:
        """Turns to the next endpoint where the server may be; where there is one alone, to the same."""
        at = (self._endpoints.index(self.endpoint) + 1) % len(self._endpoints)
        self.endpoint = self._endpoints[at]
        self._patience_s = min(1.5 * self._patience_s, self._config.connect_timeout_s)

    # -- inside --------------------------------------------------------------------------------------------------

    def _greet(self, connection: Sealed, is_again: bool) -> dict[str, Any]:
        config = self._config
        fields: dict[str, Any] = {"rank": config.rank, "channel": config.channel}
        fields.update(num_workers=config.num_workers, job=config.job)
        if config.deputy:
            fields["deputy"] = "keep" if is_again else "take"
        fields.update(self._offer_memory(connection))
        header, answer = self._agree(connection, fields) if config.has_others else self._say_hello(connection, fields)
        if header.op is not Op.HELLO or header.status is not Status.OK:
            raise HelloRefused(f"{self.name}: {answer.get('error', 'it did not greet back')}")
        if connection.offers_memory:
            is_open = answer.get("memory") is True
            connection.end_offer(accepted=is_open)
            if not is_open:
                self._say_not_shared(answer.get("memory"))
        return answer

    def _say_hello(self, connection: Sealed, fields: dict[str, Any]) -> tuple[Header, dict[str, Any]]:
        config = self._config
        limit = answer_limit_s(config)
        body = control_body(fields)
        hello = Header(Op.HELLO, client_id=self._client_id, body_bytes=len(body))
        connection.send(encode_header(hello), [body], config.answer_timeout_s)
        header = decode_header(connection.receive_header(limit, limit), config.max_body_bytes)
        answer = connection.body(header.body_bytes)
        connection.receive_body(answer, limit)
        return header, decode_control(answer)

    def _agree(self, connection: Sealed, fields: dict[str, Any]) -> tuple[Header, dict[str, Any]]:
        """Says hello until both sides know the same epoch, see [Note: Which of two servers]."""
        fence = self._config.fences.of(self._index)
        with fence.lock:
            while True:
                # A shard that moves is not promoted by questions.
                is_other = self.endpoint != (fence.leader or self._endpoints[0])
                asks_standby = bool(self._config.standbys) and is_other and fence.epoch > 0
                if asks_standby:
                    fence.bound = fence.epoch  # until it answers: it may be promoted by this question
                header, answer = self._say_hello(connection, {**fields, "epoch": fence.epoch})
                if asks_standby:
                    fence.bound = None
                self.refusals = 0
                if "standby" in answer:
                    raise ConnectionLost(f"{self.name} does not serve: {answer['standby']}.")
                known = answer.get("epoch")
                if known is not None and (int(known) <= fence.epoch or not fence.learn(int(known))):
                    raise ConnectionLost(f"{self.name} may have been replaced by its standby.")
                fence.leader = self.endpoint
                if known is None:
                    return header, answer

    def _offer_memory(self, connection: Sealed) -> dict[str, Any]:
        """Returns the field of HELLO that offers memory to a server which may be on this machine."""
        if not (self._config.shares_memory and connection.is_here):
            return {}
        try:
            return {"memory": connection.offer_memory()}
        except NotShared as error:
            self._say_not_shared(error)
            return {}

    def _say_not_shared(self, reason: object) -> None:
        if not self._config.channel and not self._told_not_shared:
            self._told_not_shared = True
            self._notify(
                f"{self.name} is on this machine and shares no memory with this worker: {reason} What is large goes "
                "through the socket, which takes more processor time. FLEET_PS_SHARED_MEMORY=0 omits this line"
            )
