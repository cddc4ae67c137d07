"""ReadLine: a reader's connection to one of the processes that have the rows of one server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError, PSError
from fleet.ps.wire.auth import AuthenticationError, prove_to_server
from fleet.ps.wire.messages import (
    MAX_BODY_BYTES,
    Buffer,
    Header,
    MessageError,
    Op,
    Status,
    control_body,
    decode_control,
    decode_header,
    encode_header,
)
from fleet.ps.wire.sealed import Sealed
from fleet.ps.wire.transport import Connection, ConnectionLost, TransferTimeout, Transport

LIMIT_S = 10.0  # a lookup that nobody can answer for so long fails
STALE_S = 3.0  # a standby that has heard nothing for longer is used only if there is no other
_CONNECT_S = 1.0
_ANSWER_S = 3.0
_PAUSE_S = 0.05
_PATIENCE_S = 0.5  # for a greeting at first: the launcher keeps the port of a server that is gone
_LOOK_S = 1.0  # how often a standby is asked whether it is stale
_LOOK_AGAIN_S = 10.0  # the same of a standby that was stale when it was chosen
_MOST_AUTH_FAILURES = 2  # one may be a server that was killed during the handshake


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """A reader's way to servers: the job's secret, how to connect, the job (None: any), the form of rows."""

    secret: bytes
    transport: Transport
    job: str | None = None
    wire: str = "float32"


class _Unable(PSError):
    """This process cannot answer now; another one may, or the same one later."""


class ReadLine:
    """Asks a process of one server number, and another process of that number when the first is lost.

    Threads take turns with ``lock``. :meth:`begin` and :meth:`finish` are one question, so that several lines can be
    asked at the same time.

    Args:
        access: the secret and the transport.
        endpoint: of the first process; it names the others.
    """

    def __init__(self, access: ReadAccess, endpoint: str) -> None:
        self.lock = threading.Lock()
        self.facts: dict[str, Any] = {}
        self.others: list[str] = []
        self._access = access
        self._endpoints = [endpoint]
        self._line: Sealed | None = None
        self._epoch = self._record = 0  # the highest that this reader has seen
        self._body = memoryview(bytearray(1 << 16))
        self._sent = False
        self._tag = 0
        self._patience_s = _PATIENCE_S
        self._look_at = 0.0
        self._auth_failures = 0
        self._closed = False

    @property
    def index(self) -> int:
        """The number of the server."""
        return int(self.facts["index"])

    def try_to_open(self) -> None:
        """Connects, if a process answers.

        Raises:
            ConfigError: it refuses this reader for good.
            PSError: nobody can answer now.
        """
        if self._line is None:
            self._connect()

    def note_seen(self, record: int) -> None:
        """Notes that the user knows of this record: no later lookup may be without it."""
        self._record = max(self._record, record)

    def begin(self, op: Op, buffers: Sequence[Buffer] = (), n_tables: int = 0) -> None:
        """Sends a question, if there is a connection; otherwise :meth:`finish` connects and sends it."""
        self._sent = False
        with suppress(PSError):
            self._look_for_fresher()
            if self._line is not None:
                self._send(op, buffers, n_tables)
                self._sent = True
                return
        self._hang_up()

    def finish(self, op: Op, buffers: Sequence[Buffer] = (), n_tables: int = 0) -> tuple[Header, memoryview]:
        """Returns the answer to the question that was begun; the body is valid until the next one.

        Raises:
            ConfigError: the server refuses this reader.
            PSError: the server refuses the question, or nobody has answered for LIMIT_S.
        """
        began = time.monotonic()
        while True:
            try:
                if not self._sent:
                    self.try_to_open()
                    self._send(op, buffers, n_tables)
                self._sent = False
                return self._receive(op)
            except (_Unable, AuthenticationError, ConnectionLost, MessageError, TimeoutError) as error:
                self._sent = False
                self._hang_up()
                if time.monotonic() - began > LIMIT_S:
                    raise PSError(
                        f"{self.name} cannot be read for {LIMIT_S:g} s; the last reason: {error} Lookups work again "
                        "once it is back."
                    ) from None
            except BaseException:
                self._hang_up()  # the rest of an answer may still come
                raise
            time.sleep(_PAUSE_S)

    @property
    def name(self) -> str:
        """For messages."""
        number = f" {self.facts['index']}" if self.facts else ""
        return f"parameter server{number} ({' or '.join(self._endpoints)})"

    def close(self) -> None:
        """Closes the connection for good."""
        self._closed = True
        self._hang_up()

    # -- inside --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Uses the first process that is up to date, else the process that heard from its server last."""
        reasons: list[str] = []
        best: tuple[Sealed, dict[str, Any], str] | None = None
        for endpoint in list(self._endpoints):
            try:
                line, facts = self._greet(endpoint)
            except AuthenticationError as error:
                self._auth_failures += 1
                if self._auth_failures >= _MOST_AUTH_FAILURES:
                    raise ConfigError(f"{error} A reader takes it from FLEET_JOB_SECRET, as workers do.") from None
                reasons.append(f"{error}")
                continue
            except (_Unable, ConnectionLost, MessageError, TimeoutError) as error:
                reasons.append(f"{error}")
                continue
            if best is not None and best[1]["age_s"] <= facts["age_s"]:
                line.close()
                continue
            if best is not None:
                best[0].close()
            best = line, facts, endpoint
            if facts["age_s"] <= STALE_S:
                break
        if best is None:
            raise _Unable(" ".join(dict.fromkeys(reasons)))
        self._use(*best)

    def _use(self, line: Sealed, facts: dict[str, Any], endpoint: str) -> None:
        self._line = line
        self.facts = facts
        self._auth_failures = 0
        self.others = [str(other) for other in facts["others"]]
        self._endpoints = list(dict.fromkeys([endpoint, *self._endpoints, *self.others]))
        self._epoch = max(self._epoch, int(facts["epoch"]))
        self._look_at = time.monotonic() + (_LOOK_S if facts["age_s"] <= STALE_S else _LOOK_AGAIN_S)

    def _greet(self, endpoint: str) -> tuple[Sealed, dict[str, Any]]:
        if self._closed:
            raise ConfigError(f"{self.name}: this reader is closed.")
        access = self._access
        connection = access.transport.connect(endpoint, _CONNECT_S)
        try:
            line = self._prove(connection, endpoint)
            # The highest epoch and record this reader has seen: a process with older rows sends it elsewhere.
            known = {"reader": True, "job": access.job, "wire": access.wire}
            body = control_body({**known, "epoch": self._epoch, "record": self._record})
            self._tag = self._tag % 0xFFFFFFFF + 1
            line.send(encode_header(Header(Op.HELLO, body_bytes=len(body), tag=self._tag)), [body], _ANSWER_S)
            facts = decode_control(self._read_answer(line, Op.HELLO, endpoint)[1])
            self._check_same(facts, endpoint)
        except BaseException:
            connection.close()
            raise
        return line, facts

    def _prove(self, connection: Connection, endpoint: str) -> Sealed:
        try:
            return prove_to_server(connection, endpoint, self._access.secret, self._patience_s)
        except TransferTimeout:
            self._patience_s = min(2 * self._patience_s, _ANSWER_S)
            raise

    def _check_same(self, facts: dict[str, Any], endpoint: str) -> None:
        """Raises PSError where another job has come to this endpoint."""
        before = self.facts or facts
        same = all(facts[name] == before[name] for name in ("job", "index"))
        if not same or any(facts["tables"].get(key, table) != table for key, table in before["tables"].items()):
            raise PSError(
                f"{endpoint}: another server is there now: number {facts['index']} of job {facts['job']!r} with the "
                f"tables {_names(facts)}; it was number {before['index']} of job {before['job']!r} with "
                f"{_names(before)}. Make a new Reader."
            )

    def _look_for_fresher(self) -> None:
        """Leaves a standby that has lost its server; the next connection prefers another process."""
        if self._line is None or not self.facts["age_s"] or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        self._send(Op.STAT)
        facts = decode_control(self._receive(Op.STAT)[1])
        if facts["age_s"] > STALE_S:
            self._hang_up()
        else:
            self.facts = facts

    def _send(self, op: Op, buffers: Sequence[Buffer] = (), n_tables: int = 0) -> None:
        assert self._line is not None
        size = sum(map(len, buffers))
        self._tag = self._tag % 0xFFFFFFFF + 1
        header = Header(op, step=self._record, n_tables=n_tables, body_bytes=size, tag=self._tag)
        self._line.send(encode_header(header), list(buffers), _ANSWER_S)

    def _receive(self, op: Op) -> tuple[Header, memoryview]:
        assert self._line is not None
        header, body = self._read_answer(self._line, op, self._endpoints[0])
        if op is Op.PULL:
            self.note_seen(header.step)
        return header, body

    def _read_answer(self, line: Sealed, op: Op, endpoint: str) -> tuple[Header, memoryview]:
        header = decode_header(line.receive_header(_ANSWER_S, _ANSWER_S), MAX_BODY_BYTES)
        if header.body_bytes > len(self._body):  # the memory is kept from answer to answer, and grows by a quarter more
            self._body = memoryview(bytearray(header.body_bytes + header.body_bytes // 4))
        body = self._body[: header.body_bytes]
        line.receive_body(body, _ANSWER_S)
        if header.op is not op or header.tag != self._tag:  # the answer to a question that Ctrl-C has interrupted
            raise MessageError(f"{endpoint} answered {header.op.name} to {op.name}, or to another question.")
        if header.status is Status.OK:
            return header, body
        fields = decode_control(body)
        if "elsewhere" in fields:
            others = [str(other) for other in fields.get("others", ())]
            self._endpoints = list(dict.fromkeys([*self._endpoints, *others]))
            raise _Unable(f"{endpoint}: {fields['elsewhere']}.")
        text = f"{endpoint}: {fields.get('error', 'no reason given')}"
        if header.status is Status.REFUSED:
            raise ConfigError(text) if op is Op.HELLO else PSError(text)
        raise _Unable(text)

    def _hang_up(self) -> None:
        """Closes the connection; the next attempt tries this process last."""
        if self._line is not None:
            self._line.close()
            self._line = None
            self._endpoints = [*self._endpoints[1:], self._endpoints[0]]


def _names(facts: dict[str, Any]) -> list[str]:
    return sorted(str(table["name"]) for table in facts["tables"].values())
