"""A cut: copies the rows that a sink lacks, so that they hold exactly the records up to one number.

[Note: Training waits for the last few rows only]
Twice all published tables stand still: their gates are held, so every change that is noted is applied, too. The first
time, for a moment, the ids that changed are collected. Their rows, or all rows for a whole delta, are read while
training goes on. The second time the number of the last record is read, and the rows that changed since the first time
are read again. A row of the first reading that has not changed since is the row at that number, too. So training waits
as long as the second, much smaller reading takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.ps.publishing.delta import Delta, RowsDelta
from fleet.ps.server.key_recorder import GONE, TOUCHED, Keys
from fleet.ps.server.served_table import ServedSparse
from fleet.ps.server.server_state import ServerState
from fleet.ps.table.sparse_table import SparseTable

_ROWS_AT_ONCE = 1 << 16


@dataclass(slots=True)
class _Read:
    """Rows of one table: ids that have one, their values, and ids that lost theirs."""

    keys: Keys
    values: NDArray[np.float32]
    gone: Keys


def published_tables(state: ServerState, names: frozenset[str] | None) -> dict[int, ServedSparse]:
    """Returns the sparse tables of these names, of all when None, in the order of their ids."""
    return {
        table_id: table
        for table_id, table in sorted(state.tables.items())
        if isinstance(table, ServedSparse) and (names is None or table.table.config.name in names)
    }


def waiting_rows(state: ServerState) -> int:
    """Returns how many rows and deletions the sink lacks; a row that changed often may count several times."""
    published = state.job.published
    if published.on and (published.whole or not published.history):
        return sum(table.table.num_rows for table in published_tables(state, None).values())
    return state.job.recorder.count(TOUCHED, GONE)


def cut(state: ServerState, names: frozenset[str] | None, previous: int, *, server: int) -> Delta | None:
    """Returns the rows that changed since record ``previous``, None when none did or rows are being loaded.

    A step that ends after its last row was published makes a delta without rows, so that readers learn of it.

    The recorder keeps the ids of the delta until the caller has written it, see ``KeyRecorder.forget`` and
    ``put_back``.
    """
    job = state.job
    tables = published_tables(state, names)
    with _standing_still(tables), job.changed:
        if job.published.loading or not tables or tables.keys() != published_tables(state, names).keys():
            return None  # a table was made just now: the next call has it
        whole = job.published.whole
        if whole:
            job.recorder.drop(TOUCHED, GONE)
            job.published.whole = False
            job.published.writing_whole = True
        first = {table_id: _move_keys(state, table_id) for table_id in tables}
        job.published.writing_since = job.published.oldest
        job.published.oldest = 0.0
    early = {}
    for table_id, (touched, gone) in first.items():
        keys = tables[table_id].table.keys() if whole else touched
        early[table_id] = _read(tables[table_id].table, keys, gone)
    with _standing_still(tables):
        with job.changed:
            if job.published.whole:  # a load came between: the rows that were read are no more
                return None
            watermark = state.journal.last_lsn
            step = job.applied_step if state.sync else min(worker.clock for worker in job.workers)
            second = {table_id: _move_keys(state, table_id) for table_id in tables}
            pushed_at = job.published.writing_since or job.published.oldest or time.time()
            job.published.writing_since = pushed_at
            job.published.oldest = 0.0
        # The gates alone are enough to read rows: with job.changed held, workers could not even report steps.
        late = {table_id: _read(tables[table_id].table, *keys) for table_id, keys in second.items()}
    rows = _deltas(state, tables, early, late, whole)
    if not rows and not whole and step == job.published.step:
        return None
    count = max((state.job.specs[table_id].get("num_servers", 1) for table_id in tables), default=1)
    return Delta(
        job.name, server, count, job.published.history, previous, watermark, step, pushed_at, whole, tuple(rows)
    )


@contextmanager
def _standing_still(tables: Mapping[int, ServedSparse]) -> Iterator[None]:
    with ExitStack() as stack:
        for table in tables.values():
            stack.enter_context(table.gate.exclusive())
        yield


def _move_keys(state: ServerState, table_id: int) -> tuple[Keys, Keys]:
    """Moves the changed ids and the deleted ids of a table into the cut, and returns them."""
    recorder = state.job.recorder
    return recorder.move(TOUCHED, table_id), recorder.move(GONE, table_id)


def _read(table: SparseTable, touched: Keys, gone: Keys) -> _Read:
    """Reads the rows of ``touched``; ids without one were never admitted, or are in ``gone``."""
    keys = touched[table.contains(touched)]
    values = np.empty((len(keys), table.config.dim), np.float32)
    # In pieces, because a pull needs scratch memory for all its keys.
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        table.pull(keys[start : start + _ROWS_AT_ONCE], values[start : start + _ROWS_AT_ONCE], create=False)
    return _Read(keys, values, np.setdiff1d(gone, keys))


def _deltas(
    state: ServerState,
    tables: Mapping[int, ServedSparse],
    early: Mapping[int, _Read],
    late: Mapping[int, _Read],
    whole: bool,
) -> list[RowsDelta]:
    deltas = []
    for table_id, served in tables.items():
        rows = _merge(early[table_id], late[table_id])
        if whole or len(rows.keys) or len(rows.gone):
            gone = np.empty(0, np.int64) if whole else rows.gone
            routing = state.job.specs[table_id].get("routing", "range")
            deltas.append(RowsDelta(served.table.config.name, rows.keys, rows.values, gone, routing))
    return deltas


def _merge(early: _Read, late: _Read) -> _Read:
    """Returns ``early`` with the changes of ``late``, which came while it was read."""
    if not len(late.keys) and not len(late.gone):
        return early
    stays = ~np.isin(early.keys, np.concatenate([late.keys, late.gone]))
    keys = np.concatenate([early.keys[stays], late.keys])
    values = np.concatenate([early.values[stays], late.values])
    gone = np.setdiff1d(np.union1d(early.gone, late.gone), late.keys)
    return _Read(keys, values, gone)
