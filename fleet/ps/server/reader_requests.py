"""What a server, or a standby, does for a reader: it answers lookups and changes nothing.

[Note: Readers of servers]
A reader says HELLO with ``reader`` on an ordinary connection of the job; from then on the connection takes PULL, STAT
and PING and nothing else. It has no rank: it holds no lease, no step waits for it, no row is made for it, and the end
of the job does not wait for it.

Each PULL brings in ``step`` the last record that the reader may have seen, and each answer says in ``step`` the record
up to which its rows reach at most. A process that has fewer records does not answer, and neither does a server whose
shard moved to another (the epoch, see [Note: Which of two servers]), so no value is older than those the reader has got
before. For that to hold after a failover, a server answers with rows of record n once its standby has confirmed n. A
standby answers at once: the next leader has every record that it has.

The answer to a PULL has the rows that exist, with their ids, in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fleet.ps.server.connected_worker import ConnectedWorker
from fleet.ps.server.job_state import Refused
from fleet.ps.server.operations import Answer
from fleet.ps.server.served_table import ServedSparse
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.wire.messages import (
    Header,
    MessageFlag,
    Op,
    Status,
    TablePart,
    control_body,
    decode_control,
    decode_parts,
    each_table,
    encode_parts,
)
from fleet.ps.wire.row_form import check_wire, to_bfloat16, to_int8

CONFIRM_S = 1.0  # a lookup waits so long for the standby, and then the reader asks elsewhere
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class Readable:
    """What a process can show to readers just now.

    Attributes:
        state: the tables.
        epoch: of the shard, 0 where it cannot change its place.
        record: the last record that is in the rows.
        kept: the last record that survives a failover.
        age_s: how long ago that was all there is.
        confirm: waits, at most for so many seconds, until a failover keeps a record; returns whether it does.
    """

    state: ServerState
    epoch: int
    record: int
    kept: int
    age_s: float = 0.0
    confirm: Callable[[int, float], bool] = lambda record, limit_s: True


class _Elsewhere(Exception):
    """This process cannot answer now; another one may."""


def is_reader(body: memoryview) -> bool:
    """Returns whether a HELLO comes from a reader."""
    return "reader" in decode_control(body)


class ReaderRequests:
    """Answers readers.

    Args:
        config: of the server.
        state: returns the state of a server that is alone with its number.
        find: of a server that is not: returns what can be read here now, or why nothing can.
    """

    def __init__(
        self,
        config: ServerConfig,
        state: Callable[[], ServerState],
        find: Callable[[], Readable | str] | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._find = find
        listed = [config.peer, *(one[config.index] for one in config.places)]
        self._others = [one for one in listed if one and one != config.endpoint]  # where a reader turns to

    def answer(self, peer: ConnectedWorker, header: Header, body: memoryview) -> Answer:
        """Returns the answer to one request of a reader.

        Raises:
            Refused, MessageError, ConfigError: the request was wrong.
        """
        try:
            if header.op is Op.HELLO:
                return self._hello(peer, decode_control(body))
            if header.op is Op.PING:
                return Answer()
            if header.op not in (Op.PULL, Op.STAT):
                raise Refused(f"a reader looks rows up and asks for facts; it sent {header.op.name}.")
            source = self._source(peer.epoch, header.step)
            if header.op is Op.STAT:
                return Answer(buffers=[control_body(self._facts(source))])
            return self._pull(source, peer, header, body)
        except _Elsewhere as reason:
            return Answer(Status.REFUSED, [control_body({"elsewhere": f"{reason}", "others": self._others})])

    def _hello(self, peer: ConnectedWorker, fields: dict[str, Any]) -> Answer:
        config = self._config
        wire = check_wire(fields.get("wire"))
        job = fields.get("job")
        epoch = fields.get("epoch")
        record = fields.get("record")
        if not isinstance(epoch, int) or not isinstance(record, int):
            raise Refused(f"a reader's HELLO has an epoch and a record; received {epoch!r} and {record!r}.")
        if job is not None and job != config.job:
            raise Refused(f"the reader asks for job {job!r}; this is a server of job {config.job!r}.")
        source = self._source(None, record)
        if source.epoch < epoch:
            raise _Elsewhere(f"it was replaced: it has epoch {source.epoch}, the reader has seen {epoch}")
        peer.reads = wire
        peer.epoch = source.epoch
        return Answer(buffers=[control_body(self._facts(source))])

    def _source(self, epoch: int | None, record: int) -> Readable:
        source = self._alone() if self._find is None else self._find()
        if isinstance(source, str):
            raise _Elsewhere(source)
        if epoch is not None and source.epoch != epoch:
            raise _Elsewhere("the server has changed its place")
        if source.record < record:
            raise _Elsewhere(f"it has the records up to {source.record}, the reader has seen those up to {record}")
        return source

    def _alone(self) -> Readable:
        state = self._state()
        last = state.journal.last_lsn
        return Readable(state, 0, last, last)

    def _facts(self, source: Readable) -> dict[str, Any]:
        state = source.state
        with state.job.changed:
            clocks = [worker.clock for worker in state.job.workers]
            step = state.job.applied_step if state.sync else min(clocks)
            specs = dict(state.job.specs)
        kept = ("name", "dim", "routing", "num_servers")
        return {
            "job": self._config.job,
            "index": self._config.index,
            "others": self._others,
            "epoch": source.epoch,
            "record": source.kept,
            "age_s": source.age_s,
            "step": step,
            "tables": {
                str(key): {name: spec[name] for name in kept}
                for key, spec in specs.items()
                if spec["kind"] == "sparse" and key in state.tables
            },
        }

    def _pull(self, source: Readable, peer: ConnectedWorker, header: Header, body: memoryview) -> Answer:
        state, parts = source.state, each_table(decode_parts(body, header.n_tables))
        size = sum(part.n * (16 + 4 * part.dim) for part in parts)
        if size > self._config.max_body_bytes:
            raise Refused(f"a lookup of {size} bytes; at most {self._config.max_body_bytes} are allowed.")
        found = [self._rows(state, part) for part in parts]
        reached = state.journal.last_lsn
        if not source.confirm(reached, CONFIRM_S):
            raise _Elsewhere("its standby does not have the newest rows yet")
        half = peer.reads == "bfloat16"
        for part in found:
            assert part.rows is not None
            if half:
                part.rows = to_bfloat16(part.rows)
            elif peer.reads == "int8":
                part.rows, part.scales = to_int8(part.rows)
        flags = MessageFlag.BFLOAT16 if half else MessageFlag.NONE
        return Answer(Status.OK, encode_parts(found, half), len(found), flags, step=reached)

    @staticmethod
    def _rows(state: ServerState, part: TablePart) -> TablePart:
        """Returns the rows that exist of those asked for; nothing is made, and nothing is noted as used."""
        table = state.table(part.table_id)
        table.check(part, change=False)
        if not isinstance(table, ServedSparse) or part.ids is None:
            _refuse_dense(part.table_id)
        rows: NDArray[np.float32] = np.empty((part.n, part.dim), np.float32)
        for _ in range(_LOOKS):  # a row may come or go between the two
            here = table.table.contains(part.ids)
            table.table.pull(part.ids, rows, create=False)
            still = table.table.contains(part.ids)
            if np.array_equal(here, still):
                break
        here = here & still
        return TablePart(part.table_id, int(here.sum()), part.dim, part.ids[here], np.ascontiguousarray(rows[here]))


def _refuse_dense(table_id: int) -> NoReturn:
    raise Refused(f"table {table_id} is dense; a reader looks up rows.")
