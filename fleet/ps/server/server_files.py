"""Saving and loading on a server: its share of each table, while training continues."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.ps.files.table_files import check_save_mode, load_dense, load_table, save_dense, save_table
from fleet.ps.files.text_format import remove_text, save_text
from fleet.ps.server.job_state import Refused
from fleet.ps.server.served_table import ServedDense, ServedSparse
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.server.snapshot import write_snapshot
from fleet.ps.table.partition import range_bounds, servers_of_keys

__all__ = ["load_tables", "save_tables"]

_KEPT_ANSWERS = 16


def save_tables(state: ServerState, config: ServerConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Saves tables and returns ``{"rows": ...}``; a save id that is done already is only answered again.

    Modes that change the rows (1, 2 and 3) end with a snapshot, so that a restart has the change, too.
    """
    dirname = _dirname(fields)
    ids = _tables(state, fields)
    mode = fields.get("mode")
    save_id = fields.get("save_id")
    text = fields.get("text", False)
    if not isinstance(mode, int) or not isinstance(save_id, str) or not isinstance(text, bool) or (text and mode):
        raise Refused("SAVE takes a mode and a save id; a save as text takes mode 0.")
    for table_id in ids:
        table = state.tables[table_id]
        if isinstance(table, ServedSparse):
            check_save_mode(mode, table.table.config)
    with state.saving:
        if save_id in state.job.saved:
            return state.job.saved[save_id]
        rows = 0
        with state.snapshots:
            for table_id in ids:
                rows += _save(state, config, table_id, dirname, mode, save_id, text)
            _note_done(state, save_id, rows)
        if mode and config.folder is not None:
            write_snapshot(state, config.folder)
            state.on_unrecorded()
    return {"rows": rows}


def _note_done(state: ServerState, key: str, rows: int) -> None:
    job = state.job
    with job.changed:
        job.saved[key] = {"rows": rows}
        while len(job.saved) > _KEPT_ANSWERS:
            del job.saved[next(iter(job.saved))]


def _save(
    state: ServerState, config: ServerConfig, table_id: int, dirname: Path, mode: int, save_id: str, text: bool
) -> int:
    table = state.tables[table_id]
    spec = state.job.specs[table_id]
    count = spec.get("num_servers", 1)
    if isinstance(table, ServedDense):
        return save_dense(
            table.table,
            dirname,
            start=spec.get("start", 0),
            total=spec.get("total"),
            server=config.index,
            num_servers=count,
            save_id=save_id,
        ).rows
    assert isinstance(table, ServedSparse)
    if text:
        return save_text(table.table, dirname, server=config.index, num_servers=count).rows
    saved = save_table(table.table, dirname, mode=mode, server=config.index, num_servers=count, save_id=save_id)
    remove_text(saved.path.parent, config.index, count)
    return saved.rows


def load_tables(state: ServerState, config: ServerConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Loads tables and returns ``{"rows": ...}``; pushes to a table wait while it is loaded.

    Gradients of open steps (sync mode) lose what they have for these tables. A load id that is done already is only
    answered again.
    """
    dirname = _dirname(fields)
    ids = _tables(state, fields)
    load_id = fields.get("load_id", "")
    rows = 0
    if not isinstance(load_id, str):
        raise Refused("LOAD takes a load id.")
    with state.saving:
        if load_id and load_id in state.job.saved:
            return state.job.saved[load_id]
        with _rows_without_records(state):
            with state.snapshots:
                for table_id in ids:
                    rows += _load(state, config, table_id, dirname)
            state.forget_held(ids)
            if load_id:
                _note_done(state, load_id, rows)
            if config.folder is not None:
                write_snapshot(state, config.folder)
        state.on_unrecorded()
    return {"rows": rows}


@contextmanager
def _rows_without_records(state: ServerState) -> Iterator[None]:
    """Keeps the publisher away until a snapshot has the rows: a restart would not know what a sink had got."""
    published = state.job.published
    with state.job.changed:
        published.whole = published.loading = True
        published.oldest = published.oldest or time.time()
    try:
        yield
    finally:
        with state.job.changed:
            published.loading = False


def _load(state: ServerState, config: ServerConfig, table_id: int, dirname: Path) -> int:
    table = state.tables[table_id]
    spec = state.job.specs[table_id]
    with table.order, table.gate.exclusive():
        if isinstance(table, ServedDense):
            load_dense(table.table, dirname, start=spec.get("start", 0), total=spec.get("total"))
            return table.table.config.size
        assert isinstance(table, ServedSparse)
        return _load_sparse(table, dirname, config.index, spec)


def _load_sparse(table: ServedSparse, dirname: Path, index: int, spec: dict[str, Any]) -> int:
    count = spec.get("num_servers", 1)
    routing = spec.get("routing", "range")
    if count == 1:
        return load_table(table.table, dirname)
    bounds = range_bounds(count)
    return load_table(
        table.table,
        dirname,
        mine=lambda keys: servers_of_keys(keys, count, routing) == index,
        ranges=(bounds[index], bounds[index + 1]) if routing == "range" else None,
    )


def _dirname(fields: dict[str, Any]) -> Path:
    dirname = fields.get("dirname")
    if not isinstance(dirname, str) or not dirname:
        raise Refused(f"dirname must be the path of a folder, received {dirname!r}.")
    return Path(dirname)


def _tables(state: ServerState, fields: dict[str, Any]) -> list[int]:
    wanted = fields.get("tables")
    if wanted is None:
        return sorted(state.tables)
    if not isinstance(wanted, list) or not all(isinstance(table_id, int) for table_id in wanted):
        raise Refused(f"tables must be a list of table ids, received {wanted!r}.")
    for table_id in wanted:
        state.table(table_id)
    return wanted
