"""What the server does for each operation of a worker that has proven the secret."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet.common.own_thread import OwnThread
from fleet.errors import FleetError
from fleet.ps.server.changed_rows import added_rows, rows_after_push, watched_rows
from fleet.ps.server.connected_worker import ConnectedWorker
from fleet.ps.server.job_state import Fenced, Refused, Worker
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.wire.messages import (
    Buffer,
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
from fleet.ps.wire.row_form import to_bfloat16

BEAT_S = 2.0
STUCK_S = 5.0  # a restarted worker may still be between two barriers
MAX_CHANNEL = 1 << 16


@dataclass(slots=True)
class Answer:
    """The status and body of an answer."""

    status: Status = Status.OK
    buffers: list[Buffer] = field(default_factory=list)
    n_tables: int = 0
    flags: int = MessageFlag.NONE
    step: int | None = None  # the step that the answer holds at least; by default the last one of sync mode

    @property
    def size(self) -> int:
        """The length of the body."""
        return sum(map(len, self.buffers))


@dataclass(slots=True)
class Later:
    """The answer to a push that waits for ``step``: ``make`` returns it once that is applied."""

    step: int
    size: int  # of its dense values, in bytes
    make: Callable[[], Answer]
    account: Callable[[], dict[str, Any]]  # the fields of the WAITING answers until then


Beat = Callable[[dict[str, Any]], None]


class Operations:
    """The operations of one server.

    Args:
        config: the server's configuration.
        state: tables, workers and journal.
        snapshot: writes a snapshot now.
        save, load: write and read the tables named in a request; return the fields of the answer.
        mark: names the published rows as a request says; returns the fields of the answer.
    """

    def __init__(
        self,
        config: ServerConfig,
        state: ServerState,
        snapshot: Callable[[], None],
        save: Callable[[dict[str, Any]], dict[str, Any]],
        load: Callable[[dict[str, Any]], dict[str, Any]],
        mark: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._config = config
        self.state = state
        self._job = state.job
        self._snapshot = snapshot
        self._save = save
        self._load = load
        self._boot = secrets.token_hex(8)
        self._handlers: dict[Op, Callable[[ConnectedWorker, Worker, Header, memoryview, Beat], Answer | Later]] = {
            Op.CREATE: self._create,
            Op.PULL: self._pull,
            Op.PUSH: self._change,
            Op.ADD: self._change,
            Op.SET_DENSE: self._change,
            Op.GEO_PULL: self._geo_pull,
            Op.WATCH: self._watch,
            Op.BARRIER: self._barrier,
            Op.ALTER: self._alter,
            Op.STAT: self._stat,
            Op.PING: lambda *_: Answer(),
            Op.GOODBYE: self._goodbye,
            Op.STOP: self._stop,
            Op.SAVE: lambda peer, worker, header, body, beat: self._file(self._save, worker, body, beat),
            Op.LOAD: lambda peer, worker, header, body, beat: self._file(self._load, worker, body, beat),
            Op.MARK: lambda peer, worker, header, body, beat: self._file(mark, worker, body, beat),
            Op.SNAPSHOT: self._write_snapshot,
        }

    def answer(self, peer: ConnectedWorker, header: Header, body: memoryview, beat: Beat) -> Answer | Later:
        """Returns the answer to one request, or how to make it when the step that it waits for is applied.

        Raises:
            Refused, MessageError, ConfigError: the request was wrong and changed nothing.
            Fenced: another process holds the rank now.
        """
        if header.op is Op.HELLO:
            return self._hello(peer, header, body)
        worker = peer.worker
        if worker is None:
            raise Fenced("the first message of a connection must be HELLO.")
        # The message and its connection: a fenced process may still have a connection from before.
        self._job.check_holds(worker, header.client_id)
        self._job.check_holds(worker, peer.client_id)
        worker.seen = time.monotonic()
        if worker.state == "expired":
            with self._job.changed:
                self._job.touch(worker, header.client_id)
        return self._handlers[header.op](peer, worker, header, body, beat)

    # -- joining and leaving -------------------------------------------------------------------------------------

    def _hello(self, peer: ConnectedWorker, header: Header, body: memoryview) -> Answer:
        fields = decode_control(body)
        rank = _whole(fields, "rank")
        number = _whole(fields, "channel")
        num_workers = _whole(fields, "num_workers")
        job = self._job
        if num_workers != job.num_workers:
            raise Refused(
                f"the worker belongs to a job of {num_workers} workers, the server to one of {job.num_workers}."
            )
        if not 0 <= rank < job.num_workers or not 0 <= number < MAX_CHANNEL or not header.client_id:
            raise Refused(f"worker rank {rank}, channel {number}: ranks are 0 to {job.num_workers - 1}.")
        if fields.get("job", job.name) != job.name:
            raise Refused(f"the worker belongs to job {fields['job']!r}, the server to job {job.name!r}.")
        worker = job.workers[rank]
        # Making a channel needs the job's lock; its own lock comes before that one (see fleet.ps.server.server_state).
        with job.changed:
            channel = worker.channel(number)
        with channel.lock, job.changed:
            fresh = job.attach(rank, header.client_id, fields.get("deputy", ""))
            answer = {
                "fresh": fresh,
                "last": channel.last,
                "durable": channel.durable_seq(self.state.journal.durable_lsn),
                "clock": worker.clock,
                "steps": {str(table): step for table, step in worker.steps.items()},
                "points": worker.points.as_json(),
                "applied_step": job.applied_step,
                "tables": sorted(job.specs),
                "barriers": dict(job.barriers),
                **self._settings(),
            }
        if "memory" in fields:
            answer["memory"] = peer.connection.accept_memory(fields["memory"])
        # Last, so that a refused HELLO leaves the connection without a worker.
        peer.worker = worker
        peer.channel = number
        peer.client_id = header.client_id
        return Answer(buffers=[control_body(answer)])

    def _settings(self) -> dict[str, Any]:
        """Returns the settings of the server that a worker needs."""
        config = self._config
        return {
            "mode": config.mode,
            "level": 3 if config.peer else config.journal_level,
            "keeps": config.folder is not None,
            "staleness": config.staleness,
            "lease_s": config.lease_s,
            "index": config.index,
            "boot": self._boot,
        }

    def _goodbye(self, peer: ConnectedWorker, worker: Worker, *_: Any) -> Answer:
        self.state.leave(worker)
        return Answer()

    def _stop(self, *_: Any) -> Answer:
        with self._job.changed:
            self._job.stop()
        self.state.late.send()
        return Answer()

    # -- tables --------------------------------------------------------------------------------------------------

    def _create(self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat) -> Answer:
        specs = decode_control(body).get("tables")
        if not isinstance(specs, dict) or not all(isinstance(spec, dict) for spec in specs.values()):
            raise Refused("CREATE takes {'tables': {id: specification}}.")
        try:
            numbered = {int(key): spec for key, spec in specs.items()}
        except ValueError:
            raise Refused(f"table ids are integers, received {sorted(specs)}.") from None
        if any(not 0 <= key < 1 << 16 for key in numbered):
            raise Refused(f"table ids are 0 to 65535, received {sorted(numbered)}.")
        with self._busy(worker):  # a save or a snapshot may take minutes
            _with_beats(lambda: self.state.create_tables(numbered), beat)
        return Answer()

    def _change(
        self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat
    ) -> Answer | Later:
        state = self.state
        if state.sync and header.op is Op.PUSH and not state.may_hold(header.step):
            self._wait_for_step(worker, lambda: state.may_hold(header.step), beat, header.step)
        if state.sync and header.op is Op.PUSH:
            # The gradients are held where they lie; a worker that waits for the values of the step leaves them there.
            body = peer.connection.kept_body(body, stays=bool(header.flags & MessageFlag.VALUES))
        parts = state.checked(header, body)
        status = state.change(worker, peer.channel, header, body, parts)
        if not header.flags & MessageFlag.VALUES:
            return Answer(status)
        dense = [part for part in parts if part.ids is None]
        make = partial(self._values, peer, worker, header, dense, beat, status)
        if not state.sync or state.visible_step >= header.step:
            return make()
        return Later(header.step, sum(4 * part.n for part in dense), make, partial(self._awaited, header.step))

    def _pull(self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat) -> Answer:
        reached, answers = self._rows(peer, worker, header, decode_parts(body, header.n_tables), beat)
        answer = self._rows_answer(answers, header)
        answer.step = reached
        return answer

    def _values(
        self, peer: ConnectedWorker, worker: Worker, header: Header, dense: list[TablePart], beat: Beat, status: Status
    ) -> Answer:
        """Returns the values and rows for a worker after its push of a step, which is applied by then."""
        reached, answers = self._rows(peer, worker, header, dense, beat)
        # The changed rows get the room that the dense values leave; 64 bytes cover the head of a part.
        room = self._config.max_body_bytes - sum(4 * part.n + 64 for part in answers)
        answers += rows_after_push(self.state, worker.rank, peer.client_id, header.seq, room)
        answer = self._rows_answer(answers, header)
        answer.step = reached
        answer.status = status
        return answer

    def _rows(
        self, peer: ConnectedWorker, worker: Worker, header: Header, parts: list[TablePart], beat: Beat
    ) -> tuple[int | None, list[TablePart]]:
        """Waits until the step of a request may see the tables; returns the step they hold, and the rows of parts."""
        tables = [self.state.served(part) for part in parts]
        # All parts are checked before the first one is pulled, because a pull may create rows.
        shapes = []
        for part, table in zip(parts, tables, strict=True):
            table.check(part, change=False)
            shapes.append(table.pull_shape(part))
        size = sum(n * dim for n, dim in shapes)
        if 4 * size + 64 * len(parts) > self._config.max_body_bytes:
            raise Refused(
                f"a pull of {4 * size} bytes; at most {self._config.max_body_bytes} are allowed. Pull less at a time."
            )
        self._wait_until_fresh(worker, header, beat)
        # Read before the rows: others may push while they are copied, and the answer promises the least step.
        reached = self._reached
        answers = []
        create = not header.flags & MessageFlag.NO_CREATE
        for part, table, rows in zip(parts, tables, peer.connection.rows(shapes), strict=True):
            table.pull(part, rows, create)
            # Without ids the part is a whole dense table.
            self.state.counts["pulled" if part.ids is not None else "pulled_elements"] += len(rows)
            answers.append(TablePart(part.table_id, rows.size, 1, rows=rows))
        return reached, answers

    @property
    def _reached(self) -> int | None:
        """The step that every worker has reached, where staleness is bounded."""
        return None if self._config.staleness is None else self._job.min_clock() or 0

    @staticmethod
    def _rows_answer(answers: list[TablePart], header: Header) -> Answer:
        bfloat16 = bool(header.flags & MessageFlag.BFLOAT16)
        if bfloat16:
            for part in answers:
                if part.rows is not None:
                    part.rows = to_bfloat16(part.rows)
        return Answer(Status.OK, encode_parts(answers, bfloat16), len(answers), header.flags & MessageFlag.BFLOAT16)

    def _wait_until_fresh(self, worker: Worker, header: Header, beat: Beat) -> None:
        if not header.flags & MessageFlag.NO_WAIT and not self._fresh_enough(header.step):
            due = header.step - (self._config.staleness or 0)
            self._wait_for_step(worker, lambda: self._fresh_enough(header.step), beat, due)

    def _fresh_enough(self, step: int) -> bool:
        if self.state.sync:
            return self.state.visible_step >= step or not self._job.active()
        if self._config.staleness is None:
            return True
        slowest = self._job.min_clock()
        return slowest is None or slowest >= step - self._config.staleness

    def _geo_pull(self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat) -> Answer:
        asked = each_table(decode_parts(body, header.n_tables))
        return self._rows_answer(
            added_rows(self.state, worker.rank, header.seq, asked, self._config.max_body_bytes), header
        )

    def _watch(self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat) -> Answer:
        asked = each_table(decode_parts(body, header.n_tables))
        lacks, rows = watched_rows(self.state, worker.rank, header.seq, asked, self._config.max_body_bytes)
        answer = self._rows_answer(rows, header)
        answer.step = int(lacks)
        return answer

    def _alter(self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat) -> Answer:
        fields = decode_control(body)
        table = _whole(fields, "table")
        action = fields.get("action")
        arguments = fields.get("fields", {})
        if not isinstance(action, str) or not isinstance(arguments, dict):
            raise Refused("ALTER takes a table, an action and its fields.")
        with self._busy(worker):
            status, rows = _with_beats(
                lambda: self.state.alter(worker, peer.channel, header, table, action, arguments), beat
            )
        return Answer(status, [control_body({"rows": rows})])

    # -- meeting points ------------------------------------------------------------------------------------------

    def _barrier(self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat) -> Answer:
        fields = decode_control(body)
        number = header.step
        job = self._job
        name = fields.get("name")
        call = fields.get("call") or f"barrier {fields.get('name')!r}"
        wish = fields.get("wish", "")
        if not isinstance(call, str) or not isinstance(wish, str):
            raise Refused("BARRIER takes the call and the wish of the worker as text.")
        if not isinstance(name, str) or len(name) > 256 or number < 1:
            raise Refused("BARRIER takes a name of at most 256 characters and a number from 1.")
        with job.changed:
            is_past = job.barriers.get(name, 0) >= number  # the worker comes again, after a restart
            job.arrive(name, number, worker.rank, wish)
        self.state.settle()  # the others stop waiting for a step of this worker
        self._stand(worker, name, number, call, beat)
        # Workers that have taken fewer steps continue with the same number, or the others would wait for them.
        clocks = [worker.clock for worker in job.active()] if self._config.staleness is not None else []
        step = 0 if is_past else max([job.applied_step, *clocks])
        with job.changed:
            key = job.keys.get(name, "") if job.barriers[name] == number else None
        return Answer(buffers=[control_body({"step": step, "key": key})])

    def _stand(self, worker: Worker, name: str, number: int, call: str, beat: Beat) -> None:
        """Waits until the barrier is open.

        Raises:
            Refused: all workers stand at barriers, but at different ones.
        """
        job = self._job
        rank = worker.rank

        def say() -> None:
            with job.changed:
                job.note_stuck(STUCK_S)
            place = f"{call}: they must call it, too. {job.account()}"
            beat({"place": place, "waiting_for": job.absent(name, number)})

        with job.changed:
            job.standing[rank] = (call, time.monotonic())
            # The account of an earlier call would end this one at once.
            job.stuck.pop(rank, None)
        try:
            with self._busy(worker):
                job.wait_for(lambda: job.barriers.get(name, 0) >= number or rank in job.stuck, say, BEAT_S)
        finally:
            with job.changed:
                job.standing.pop(rank, None)
                account = job.stuck.pop(rank, None)
        if account is not None:
            raise Refused(
                f"{call} waits for all workers, and none can continue: {account}. Every worker must make this call, at "
                "the same place in the script, not under fleet.is_first_worker()."
            )

    def _wait_for_step(self, worker: Worker, predicate: Callable[[], bool], beat: Beat, step: int) -> None:
        with self._busy(worker):
            self._job.wait_for(predicate, lambda: beat(self._awaited(step)), BEAT_S)

    def _awaited(self, step: int) -> dict[str, Any]:
        return {"place": f"step {step}", "waiting_for": self._job.slower_than(step)}

    @contextmanager
    def _busy(self, worker: Worker) -> Iterator[None]:
        """Keeps the lease of a worker while it waits for this server."""
        with self._job.changed:
            worker.busy += 1
        try:
            yield
        finally:
            with self._job.changed:
                worker.busy -= 1
                # The lease runs from the answer, not from the request.
                worker.seen = time.monotonic()

    # -- files and facts -----------------------------------------------------------------------------------------

    def _file(
        self, action: Callable[[dict[str, Any]], dict[str, Any]], worker: Worker, body: memoryview, beat: Beat
    ) -> Answer:
        fields = decode_control(body)

        def act() -> dict[str, Any]:
            try:
                return action(fields)
            except FleetError:
                raise
            except OSError as error:  # from the disk, without a path
                raise Refused(f"{fields.get('dirname')}: {error}.") from None

        with self._busy(worker):
            return Answer(buffers=[control_body(_with_beats(act, beat))])

    def _write_snapshot(
        self, peer: ConnectedWorker, worker: Worker, header: Header, body: memoryview, beat: Beat
    ) -> Answer:
        with self._busy(worker):
            _with_beats(self._snapshot, beat)
        return Answer()

    def _stat(self, *_: Any) -> Answer:
        state = self.state
        job = self._job
        tables = {str(key): table.describe() for key, table in state.tables.items()}
        with job.changed:
            facts = {
                "index": self._config.index,
                "tables": tables,
                "workers": [{"state": worker.state, "clock": worker.clock} for worker in job.workers],
                "applied_step": job.applied_step,
                "origin": job.origin,
                "held": {str(step): sorted(ranks) for step, ranks in job.held.items()},
                "records": state.journal.last_lsn,
                "durable": state.journal.durable_lsn,
                **state.counts,
            }
        return Answer(buffers=[control_body(facts)])


def _whole(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{name} must be an integer, received {value!r}.")
    return value


def _with_beats(action: Callable[[], Any], beat: Beat) -> Any:
    """Runs ``action`` in a thread and tells the worker every few seconds that it is still running."""
    thread = OwnThread(action, name="parameter server action", say=None)
    thread.start()
    while thread.is_alive():
        thread.join(BEAT_S)
        if thread.is_alive():
            beat({})
    if isinstance(thread.failure, OSError) and not isinstance(thread.failure, FleetError):
        raise Refused(str(thread.failure))
    return thread.result()
