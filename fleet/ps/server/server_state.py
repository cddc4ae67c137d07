"""The server's state machine: every change of tables and workers, applied once, in an order the journal keeps.

Locks are taken in this order: ``saving``, the channel's, ``_applying`` (sync mode), ``snapshots``, the tables'
``order`` by id, the tables' gates by id, the journal's.

[Note: A change is applied once]
A change has a number in its channel, and most have a step. The number tells a message that is sent again after a cut
(``seq <= channel.last``). The step tells a worker that went back to a checkpoint and pushes again under new numbers: a
table takes a step of a worker once (``fresh_tables``). A change then goes like this::

    hold its tables (order, gate)
        under the journal's lock: append the record, note number, step and clock
        change the tables, where the step is new

The tables are held from before the record until after the change, so a row copied with stamp N holds exactly the
records up to N that touch it. If the record cannot be written, nothing has changed. If the tables fail after it, the
journal has a change that they lack: the server ends (``_fail``) and a restart applies it. A replay calls the same
``_note`` and ``_apply`` for each record, and skips the rows that the snapshot already has.

A shrink, a day, a clear and a learning rate are made first and recorded then, because only the table knows whether it
takes them. Their gate is exclusive and no snapshot runs, so no other change and no snapshot comes between the two.

In sync mode a push is a HELD record and waits in ``job.held``. Once every worker that can still push has one for the
step, an APPLY record names the step and the ranks, and their mean is applied as one push; a replay merges the same
gradients in the same order. ``applied_step`` moves with the record, before the tables change: pulls wait for
``visible_step``, which moves after.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from fleet.errors import ConfigError, PSError
from fleet.ps.server.job_state import Held, JobState, Refused, Worker
from fleet.ps.server.journal import Journal, Record, RecordKind
from fleet.ps.server.key_recorder import GONE, TOUCHED, Keys
from fleet.ps.server.late_answers import LateAnswers
from fleet.ps.server.mean_parts import merge_parts, parts_alike
from fleet.ps.server.served_group import ServedGroup, ServedGroups
from fleet.ps.server.served_table import ServedSparse, ServedTable, Stamps, missing_parts
from fleet.ps.server.stream_points import refuse_overtaken
from fleet.ps.table.table_spec import check_spec
from fleet.ps.wire.messages import (
    Buffer,
    Header,
    MessageFlag,
    Op,
    Status,
    TablePart,
    decode_parts,
    each_table,
    encode_parts,
    rows_of,
    tables_of,
)
from fleet.ps.wire.positions import Positions, split_positions
from fleet.ps.wire.row_form import wide_parts

MAX_AHEAD = 4  # steps that one worker may be ahead of the others (sync mode)
_KIND_OF_OP = {Op.PUSH: RecordKind.PUSH, Op.ADD: RecordKind.ADD, Op.SET_DENSE: RecordKind.SET_DENSE}
MakeTable = Callable[[dict[str, Any]], ServedTable]


class ServerState:
    """Tables, workers and journal of one server.

    Args:
        job: the workers and their agreements.
        journal: where changes are written before they are applied.
        make_table: makes an empty table from a specification.
        sync: hold the gradients of a step until those of all active workers are here, then apply their mean.
    """

    def __init__(self, job: JobState, journal: Journal, make_table: MakeTable, *, sync: bool) -> None:
        self.job = job
        self.journal = journal
        self.sync = sync
        self.tables: dict[int, ServedTable] = {}
        self._groups = ServedGroups(self.tables)
        self.snapshots = threading.Lock()
        self.saving = threading.Lock()  # one save or load at a time
        # Why a load could not be made, by its id and whether this is what its check found; "": nothing is wrong.
        self.load_problems: dict[tuple[str, bool], str] = {}
        self.failure: BaseException | None = None
        self.counts = dict.fromkeys(("applied", "duplicates", "rows", "elements", "pulled", "pulled_elements"), 0)
        self.make_table = make_table
        self.on_unrecorded: Callable[[], None] = lambda: None  # called after rows have changed without a record
        self._applying = threading.Lock()
        self._unfinished: int | None = None  # the step whose gradients are being applied now
        self.late = LateAnswers(job, lambda step: step <= self.visible_step)

    # -- tables --------------------------------------------------------------------------------------------------

    def create_tables(self, specs: dict[int, dict[str, Any]]) -> None:
        """Makes the missing tables; existing ones must have the same specification.

        Raises:
            Refused: a specification differs or is wrong; nothing was made.
        """
        with self.snapshots:
            # All tables are made before the record is written: a wrong specification among several changes nothing.
            made = {}
            for table_id, spec in specs.items():
                known = self.job.specs.get(table_id)
                try:
                    if known is None:
                        made[table_id] = self.make_table(spec)
                    else:
                        check_spec(table_id, known, spec)
                except ConfigError as error:
                    raise Refused(str(error)) from None
            if not made:
                return
            new = {table_id: specs[table_id] for table_id in made}
            with self.journal.lock:
                self.journal.append(_control(RecordKind.CREATE, {str(key): spec for key, spec in new.items()}))
                self._install(made, new)

    def _install(self, made: dict[int, ServedTable], specs: dict[int, dict[str, Any]]) -> None:
        self.job.specs = {**self.job.specs, **specs}
        for table_id, table in made.items():
            self.adopt(table_id, table)

    def adopt(self, table_id: int, table: ServedTable) -> None:
        """Serves ``table``; the ids of rows that it deletes from now on are noted for the sink."""
        if isinstance(table, ServedSparse):
            table.table.on_delete = partial(self._note_gone, table_id)
        # A new dict instead of a change in place: requests look tables up without a lock.
        self.tables = {**self.tables, table_id: table}

    def _note_gone(self, table_id: int, keys: Keys) -> None:
        with self.job.changed:
            self.job.note_changed(table_id, keys, gone=True)

    def table(self, table_id: int) -> ServedTable:
        """Returns the table; raises :class:`Refused` if it does not exist."""
        return self._served_now().table(table_id)

    def served(self, part: TablePart) -> ServedTable | ServedGroup:
        """Returns the table of a part, or the group of its tables; raises :class:`Refused` for an unknown one."""
        return self._served_now().find(part)

    def _served_now(self) -> ServedGroups:
        # Groups are those of one set of tables: a table that takes the place of another has none yet.
        tables = self.tables
        groups = self._groups
        if groups.tables is not tables:
            groups = self._groups = ServedGroups(tables)
        return groups

    @contextmanager
    def _held(self, table_ids: Sequence[int]) -> Iterator[None]:
        # In the order of the ids, as every holder does, or two pushes could wait for each other.
        tables = [self.tables[table_id] for table_id in sorted(table_ids)]
        held: list[AbstractContextManager[Any]] = []
        try:
            # Without a journal no record fixes an order. The gates are needed all the same: they keep out a shrink or a
            # copy.
            for one in [table.order for table in tables] if self.journal.level else ():
                one.__enter__()
                held.append(one)
            for side in [table.gate.shared() for table in tables]:
                side.__enter__()
                held.append(side)
            yield
        finally:
            for each in reversed(held):
                each.__exit__(None, None, None)

    # -- gradients -----------------------------------------------------------------------------------------------

    def change(self, worker: Worker, number: int, header: Header, body: memoryview, parts: list[TablePart]) -> Status:
        """Applies a push, an addition or a setting of dense values, unless it was applied before.

        In sync mode ``body`` is kept, whose :meth:`checked` parts are ``parts``, until the step is applied: it must not
        change.
        """
        channel = worker.channel(number)
        with channel.lock:
            # Every push comes here, so the job's lock is taken only where the lease or the process has changed.
            if worker.client_id != header.client_id or worker.state == "expired":
                with self.job.changed:
                    self.job.touch(worker, header.client_id)
            if header.seq <= channel.last:
                self.counts["duplicates"] += 1
                return Status.DUPLICATE
            if self.sync and header.op is Op.PUSH:
                status = self._hold(worker, number, header, body, parts)
            else:
                status = self._apply_now(worker, number, header, parts, body)
        # Outside the channel's lock: the last gradient of a step applies the gradients of all workers.
        if self.sync:
            self.apply_ready()
        return status

    def checked(self, header: Header, body: memoryview) -> list[TablePart]:
        """Returns the parts of a change, with float32 rows.

        Raises:
            Refused: the message does not fit the tables.
        """
        if not header.seq:
            raise Refused("a change needs its number in the channel, from 1.")
        if header.flags & MessageFlag.POSITIONS and (header.op is not Op.PUSH or not header.step):
            raise Refused("positions of streams come with a push that has a step.")
        own = parts_of(body, header.flags)[0]
        parts = decode_parts(own, header.n_tables, bool(header.flags & MessageFlag.BFLOAT16))
        for part in parts:
            self.served(part).check(part, change=True)
            if header.op is Op.SET_DENSE and part.ids is not None:
                raise Refused(f"table {part.table_id} is sparse; values are set in dense tables only.")
        return wide_parts(parts)

    def _apply_now(
        self, worker: Worker, number: int, header: Header, parts: list[TablePart], body: memoryview
    ) -> Status:
        record = Record(
            _KIND_OF_OP[header.op],
            0,
            worker.rank,
            number,
            header.seq,
            header.step,
            header.n_tables,
            int(header.flags & (MessageFlag.BFLOAT16 | MessageFlag.NO_CLOCK | MessageFlag.POSITIONS)),
            body,
        )
        with self._held(tables_of(parts)):
            with self.job.changed:
                self._refuse_overtaken(record, worker)
                lsn = self.journal.append(record)
                fresh = self._note(record, worker, parts, lsn)
                # Read under the lock, so that a worker that asks while the rows change is noticed below.
                takes = self.job.recorder.takes
            try:
                self._apply(record.kind, rows_of(parts, fresh), lsn)
                self._evict(tables_of(parts))
            except BaseException as error:
                self._fail(error)
                raise
        with self.job.changed:
            if self.job.recorder.takes != takes:  # a worker may have been told of these rows and read them before
                for part in each_table(rows_of(parts, fresh)):
                    if part.ids is not None:
                        self._note_for_workers(part.table_id, part.ids.copy(), _adder(record))
            self.job.changed.notify_all()
        return Status.OK if fresh or not parts else Status.DUPLICATE

    def _note(self, record: Record, worker: Worker, parts: list[TablePart], lsn: int) -> set[int]:
        """Notes a change and returns the tables it is new for; the caller holds the journal's lock."""
        ids = tables_of(parts)
        step = record.step if record.kind != RecordKind.SET_DENSE else 0
        fresh = self.job.fresh_tables(worker, step, ids)
        worker.channel(record.channel).note(lsn, record.seq)
        self.job.note_step(worker, step, fresh)
        # A worker may send the tables of a step in several pushes: only the last of them moves its clock.
        if not record.flags & MessageFlag.NO_CLOCK:
            worker.clock = max(worker.clock, step)
        self._note_positions(record, worker, fresh)
        if self.job.published.on or _adder(record) is not None or self.job.recorder.is_watched:
            for part in each_table(rows_of(parts, fresh)):
                if part.ids is not None:
                    self._note_changed(record, part.table_id, part.ids)
        self.counts["duplicates"] += len(ids) - len(fresh)
        return fresh

    def _note_changed(self, record: Record, table_id: int, ids: Keys) -> None:
        if self.job.published.on or _adder(record) is not None or self.job.recorder.watching(table_id):
            # A copy: the ids lie in the buffer of the connection, which the next message overwrites.
            kept = ids.copy()
            self.job.note_changed(table_id, kept)
            self._note_for_workers(table_id, kept, _adder(record))

    def _note_for_workers(self, table_id: int, ids: Keys, added_by: int | None = None) -> None:
        """Notes changed ids for workers with rows of their own; the array must not change afterwards."""
        readers = set(self.job.recorder.watching(table_id))
        if added_by is not None:
            readers.update(worker.rank for worker in self.job.workers if worker.rank != added_by)
        self.job.recorder.mark(readers, table_id, ids)

    def _refuse_overtaken(self, record: Record, worker: Worker) -> None:
        """Raises MessageError when another worker reads this one's partitions now; the journal's lock is held."""
        positions = parts_of(record.body, record.flags)[1]
        if positions and record.step > worker.clock:
            refuse_overtaken([each.points for each in self.job.workers], worker.rank, positions)

    def _note_positions(self, record: Record, worker: Worker, tables: set[int]) -> None:
        positions = parts_of(record.body, record.flags)[1]
        if positions is not None:
            ends_step = not record.flags & MessageFlag.NO_CLOCK
            worker.points.note(record.step, positions, tables, ends_step)

    def _apply(self, kind: int, parts: Sequence[TablePart], lsn: int) -> None:
        for part in parts:
            table = self.served(part)
            if kind == RecordKind.PUSH:
                table.push(part, lsn)
            elif kind == RecordKind.ADD:
                table.add(part, lsn)
            else:
                table.set_values(part)
            self.counts["rows" if part.ids is not None else "elements"] += part.n
        self.counts["applied"] += 1

    def _evict(self, table_ids: Sequence[int]) -> None:
        """Brings tables above their limits below them, see [Note: Eviction]; the caller holds these tables.

        A journal that takes no record leaves the rows: it takes no push either, and the next one evicts them.
        """
        for table_id in table_ids:
            if not self.tables[table_id].is_limited:
                continue
            keys = self.tables[table_id].victims()
            if len(keys):
                parts = [TablePart(table_id, len(keys), 1, keys)]
                body = b"".join(encode_parts(parts))
                try:
                    with self.job.changed:
                        self.journal.append(Record(RecordKind.EVICT, 0, n_tables=1, body=body))
                except PSError:
                    return
                self._erase(parts)

    def _erase(self, parts: Sequence[TablePart]) -> None:
        for part in parts:
            self.tables[part.table_id].erase(part)

    def evict_all(self) -> None:
        """Evicts the rows that were due when the server was killed; the journal is open and nobody is served yet."""
        for table_id in sorted(self.tables):
            with self._held([table_id]):
                self._evict([table_id])

    # -- sync mode -----------------------------------------------------------------------------------------------

    def may_hold(self, step: int) -> bool:
        """Returns whether there is room for the gradient of ``step`` (sync mode)."""
        return step <= self.job.applied_step + MAX_AHEAD or not self.job.held

    def _hold(self, worker: Worker, number: int, header: Header, body: memoryview, parts: list[TablePart]) -> Status:
        if not header.step:
            raise Refused("a push in sync mode needs the number of its step, from 1.")
        flags = int(header.flags & (MessageFlag.BFLOAT16 | MessageFlag.POSITIONS))
        record = Record(RecordKind.HELD, 0, worker.rank, number, header.seq, header.step, header.n_tables, flags, body)
        held = _held_of(record, parts)
        with self.job.changed:
            self._refuse_overtaken(record, worker)
            if flags & MessageFlag.POSITIONS and worker.clock < header.step <= self.job.applied_step:
                raise Refused(
                    f"worker {worker.rank}: the others took step {header.step} without it, after its lease ended. Its "
                    "events would be lost: restart it, and it goes on behind the last ones that were trained."
                )
            new = self._note_held(record, worker, held, self.journal.append(record))
        return Status.OK if new else Status.DUPLICATE

    def _note_held(self, record: Record, worker: Worker, held: Held, lsn: int) -> bool:
        new = self.job.hold(worker.rank, record.step, held)
        worker.channel(record.channel).note(lsn, record.seq)
        worker.clock = max(worker.clock, record.step)
        self._note_positions(record, worker, set())
        self.counts["duplicates"] += not new
        return new

    def apply_ready(self) -> None:
        """Applies every step for which the gradients of all active workers are here, then opens barriers.

        It sends the answers that waited for these steps.
        """
        try:
            self._apply_held()
        finally:
            self.late.send()

    def _apply_held(self) -> None:
        with self._applying:
            while True:
                with self.job.changed:
                    step = self.job.ready_step()
                    if step is None:
                        self._open_barriers()
                        return
                    ranks = sorted(self.job.held[step])
                    gradients = [self.job.held[step][rank] for rank in ranks]
                # Without the job's lock, because large gradients take a while; ``_applying`` keeps the held gradients
                # in place.
                merged = self._merged(gradients, len(ranks))
                with self._held(tables_of(merged)):
                    with self.job.changed:
                        lsn = self.journal.append(_control(RecordKind.APPLY, {"step": step, "ranks": ranks}))
                        # Before ``applied_step`` moves, or ``visible_step`` would show a step that the tables lack.
                        self._unfinished = step
                        self.job.take_held(step, ranks)
                        self._note_merged(merged)
                        takes = self.job.recorder.takes
                    try:
                        self._apply(RecordKind.PUSH, merged, lsn)
                        self._evict(tables_of(merged))
                    except BaseException as error:
                        self._fail(error)
                        raise
                with self.job.changed:
                    if self.job.recorder.takes != takes:  # a worker whose lease had ended may have asked too early
                        for part in each_table(merged):
                            if part.ids is not None:
                                self._note_for_workers(part.table_id, part.ids)
                    self._unfinished = None
                    self.job.changed.notify_all()

    def _note_merged(self, merged: Sequence[TablePart]) -> None:
        if not (self.job.published.on or self.job.recorder.is_watched):
            return
        for part in each_table(merged):
            if part.ids is not None:
                self.job.note_changed(part.table_id, part.ids)
                self._note_for_workers(part.table_id, part.ids)

    def forget_held(self, table_ids: Sequence[int]) -> None:
        """Drops the rows of these tables from held gradients; their steps stay open.

        So a gradient that was computed with the rows before a load changes nothing after it. Sending it again does not
        help either: its step is known.
        """
        with self._applying, self.job.changed:
            for ranks in self.job.held.values():
                ranks.update({rank: _without(held, table_ids) for rank, held in ranks.items()})

    @property
    def visible_step(self) -> int:
        """The last step that is applied completely, which pulls wait for (sync mode)."""
        applied = self.job.applied_step
        unfinished = self._unfinished  # in this order: they change in the other
        return applied if unfinished is None else min(applied, unfinished - 1)

    def _merged(self, gradients: Sequence[Held], divisor: int) -> list[TablePart]:
        parts = []
        # Gradients by rank: a replay adds the same floats in the same order.
        for held in gradients:
            bfloat16 = bool(held.flags & MessageFlag.BFLOAT16)
            parts += held.parts or wide_parts(decode_parts(held.body, held.n_tables, bfloat16))
        return [
            merge_parts(alike, divisor, self.tables[alike[0].table_id].keeps_shows)
            for alike in parts_alike(parts, lambda table_id: self.tables[table_id].keeps_shows)
        ]

    # -- other changes -------------------------------------------------------------------------------------------

    def alter(
        self, worker: Worker, number: int, header: Header, table_id: int, action: str, fields: dict[str, Any]
    ) -> tuple[Status, int]:
        """Shrinks, ages or clears a table, or sets its learning rate, once; returns the number of rows affected."""
        if not header.seq:
            raise Refused("a change needs its number in the channel, from 1.")
        table = self.table(table_id)
        channel = worker.channel(number)
        with channel.lock:
            with self.job.changed:
                self.job.touch(worker, header.client_id)
            if header.seq <= channel.last:
                return Status.DUPLICATE, 0
            # No snapshot runs at the same time: in one, all rows of a table hold an alteration or none does, see
            # _replay_control().
            with self.snapshots, table.order, table.gate.exclusive():
                try:
                    rows = table.alter(action, fields)
                except (ConfigError, KeyError, TypeError, ValueError) as error:
                    raise Refused(f"{action} of table {table_id}: {error}") from None
                with self.job.changed:
                    # The record follows once the table has taken the alteration: a replay has nobody to refuse it to.
                    body = {"table": table_id, "action": action, "fields": fields}
                    record = _control(RecordKind.ALTER, body, worker.rank, number, header.seq)
                    channel.note(self.journal.append(record), header.seq)
        return Status.OK, rows

    def begin_history(self, history: str, boot: str) -> None:
        """Notes the identity that sinks know this server's journal by from now on; empty: rows are not published."""
        with self.job.changed:
            kept_for = (boot, self.journal.level)
            fields = {"history": history, "boot": boot, "level": self.journal.level}
            lsn = self.journal.append(_control(RecordKind.HISTORY, fields))
            self.job.published.begin(history, kept_for, lsn)
            # The sink's new history begins here; the ids noted before belong to the old one.
            self.job.recorder.drop(TOUCHED, GONE)

    def settle(self) -> None:
        """Opens the barriers at which all active workers stand, once everything they pushed before is applied."""
        if self.sync:
            self.apply_ready()
        else:
            with self.job.changed:
                self._open_barriers()

    def _open_barriers(self) -> None:
        for name, number in self.job.settle_barriers().items():
            fields = {"name": name, "number": number, "key": self.job.keys[name]}
            self.journal.append(_control(RecordKind.BARRIER, fields))

    def leave(self, worker: Worker) -> None:
        """Notes a goodbye: nobody waits for this worker any longer."""
        with self.job.changed:
            self.journal.append(Record(RecordKind.GOODBYE, 0, worker.rank))
            self.job.leave(worker)
        # The others may have waited for this worker alone.
        self.settle()

    def _fail(self, error: BaseException) -> None:
        """Ends the server: the journal holds a change that the tables lack."""
        self.failure = error
        with self.job.changed:
            self.job.stop()

    # -- recovery ------------------------------------------------------------------------------------------------

    def replay(self, record: Record, stamps: dict[int, Stamps]) -> None:
        """Applies a journaled record to the rows that do not hold it yet."""
        worker = self.job.workers[record.rank]
        if record.kind in (RecordKind.PUSH, RecordKind.ADD, RecordKind.SET_DENSE):
            parts = self._record_parts(record)
            fresh = self._note(record, worker, parts, record.lsn)
            missing = missing_parts(rows_of(parts, fresh), stamps, record.lsn)
            self._apply(record.kind, missing, record.lsn)
        elif record.kind == RecordKind.EVICT:
            self._erase(missing_parts(self._record_parts(record), stamps, record.lsn))
        elif record.kind == RecordKind.HELD:
            self._note_held(record, worker, _held_of(record), record.lsn)
        elif record.kind == RecordKind.GOODBYE:
            worker.state = "gone"
        else:
            self._replay_control(record, worker, json.loads(bytes(record.body)), stamps)

    def _replay_control(
        self, record: Record, worker: Worker, fields: dict[str, Any], stamps: dict[int, Stamps]
    ) -> None:
        if record.kind == RecordKind.CREATE:
            specs = {int(key): spec for key, spec in fields.items()}
            self._install({key: self.make_table(spec) for key, spec in specs.items()}, specs)
        elif record.kind == RecordKind.APPLY:
            merged = self._merged(self.job.take_held(fields["step"], fields["ranks"]), len(fields["ranks"]))
            self._note_merged(merged)
            self._apply(RecordKind.PUSH, missing_parts(merged, stamps, record.lsn), record.lsn)
        elif record.kind == RecordKind.ALTER:
            worker.channel(record.channel).note(record.lsn, record.seq)
            table_id = fields["table"]
            # No snapshot runs during an alteration, so either all rows of the table hold it or none does.
            if table_id not in stamps or record.lsn > stamps[table_id].latest:
                self.tables[table_id].alter(fields["action"], fields["fields"])
        elif record.kind == RecordKind.BARRIER:
            self.job.pass_barrier(fields["name"], fields["number"], fields["key"])
        elif record.kind == RecordKind.HISTORY:
            self.job.published.begin(fields["history"], (fields["boot"], fields["level"]), record.lsn)
            self.job.recorder.drop(TOUCHED, GONE)
        else:
            raise PSError(f"the journal holds a record of kind {record.kind}, which this version does not know.")

    def _record_parts(self, record: Record) -> list[TablePart]:
        body = parts_of(record.body, record.flags)[0]
        return wide_parts(decode_parts(body, record.n_tables, bool(record.flags & MessageFlag.BFLOAT16)))


def _control(kind: int, fields: dict[str, Any], rank: int = 0, channel: int = 0, seq: int = 0) -> Record:
    return Record(kind, 0, rank, channel, seq, body=json.dumps(fields).encode())


def _adder(record: Record) -> int | None:
    """Returns who made an addition (geo), which all others are told of."""
    return record.rank if record.kind == RecordKind.ADD else None


def parts_of(body: Buffer, flags: int) -> tuple[Buffer, Positions | None]:
    """Returns the parts of a change, and the positions of streams that follow them, if any do."""
    return split_positions(body) if flags & MessageFlag.POSITIONS else (body, None)


def _held_of(record: Record, parts: list[TablePart] | None = None) -> Held:
    return Held(record.n_tables, record.flags & ~MessageFlag.POSITIONS, parts_of(record.body, record.flags)[0], parts)


def _without(held: Held, table_ids: Sequence[int]) -> Held:
    bfloat16 = bool(held.flags & MessageFlag.BFLOAT16)
    parts = decode_parts(held.body, held.n_tables, bfloat16)
    parts = rows_of(parts, set(tables_of(parts)) - set(table_ids))
    return Held(len(parts), held.flags, b"".join(encode_parts(parts, bfloat16)))
