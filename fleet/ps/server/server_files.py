"""Saving and loading on a server: its share of each table, while training continues."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.ps.files.table_files import (
    check_save_mode,
    check_table,
    load_checked_table,
    load_dense,
    read_dense,
    save_dense,
    save_table,
)
from fleet.ps.files.text_format import remove_text, save_text
from fleet.ps.server.job_state import Refused
from fleet.ps.server.served_table import ServedDense, ServedSparse
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.server.snapshot import write_snapshot
from fleet.ps.table.partition import range_bounds, servers_of_keys

_KEPT_ANSWERS, _MOST_REASON = 16, 4000


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
            note_origin(state, fields)
        if mode and config.folder is not None:
            write_snapshot(state, config.folder)
            state.on_unrecorded()
    return {"rows": rows}


def _note_done(state: ServerState, key: str, rows: int) -> None:
    with state.job.changed:
        state.job.saved[key] = {"rows": rows}
        _keep_latest(state.job.saved)


def _keep_latest(answers: dict[Any, Any]) -> None:
    while len(answers) > _KEPT_ANSWERS:
        del answers[next(iter(answers))]


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

    With ``check`` it reads all that it would load, changes nothing, and says why it would be ``refused``, or "": a
    worker has every server check before it has the first one load. Gradients of open steps (sync mode) lose
    their rows of these tables. A load id is checked and loaded once; a worker that asks again is told the same, so that
    all workers go the same way.
    """
    dirname = _dirname(fields)
    ids = _tables(state, fields)
    load_id = fields.get("load_id", "")
    check = fields.get("check", False)
    if not isinstance(load_id, str) or not isinstance(check, bool):
        raise Refused("LOAD takes a load id, and whether it is a check.")
    with state.saving:
        if load_id and load_id in state.job.saved:
            return state.job.saved[load_id]
        if check:
            return {"rows": 0, "refused": _problem_of(state, config, ids, dirname, load_id)}
        if (load_id, False) in state.load_problems:
            raise Refused(state.load_problems[load_id, False])
        try:
            return {"rows": _load_all(state, config, ids, fields, load_id)}
        except Exception as error:
            _note_problem(state, load_id, False, _reason(dirname, error))
            raise


def _problem_of(state: ServerState, config: ServerConfig, ids: list[int], dirname: Path, load_id: str) -> str:
    """Returns why the tables cannot be loaded, or "", as it was found when the load id was checked first."""
    found = state.load_problems.get((load_id, True))
    if found is None:
        try:
            _check_all(state, config, ids, dirname)
            found = ""
        except (FleetError, OSError) as error:
            found = _reason(dirname, error)
        _note_problem(state, load_id, True, found)
    return found


def _reason(dirname: Path, error: Exception) -> str:
    return f"{error}"[:_MOST_REASON] if isinstance(error, FleetError) else f"{dirname}: {error}."


def _note_problem(state: ServerState, load_id: str, check: bool, reason: str) -> None:
    if load_id:
        state.load_problems[load_id, check] = reason
        _keep_latest(state.load_problems)


def _check_all(state: ServerState, config: ServerConfig, ids: list[int], dirname: Path) -> None:
    for table_id in ids:
        table = state.tables[table_id]
        spec = state.job.specs[table_id]
        if isinstance(table, ServedDense):
            read_dense(table.table.config, dirname, start=spec.get("start", 0), total=spec.get("total"))
        else:
            assert isinstance(table, ServedSparse)
            check_table(table.table, dirname, ranges=_share(config.index, spec).get("ranges"))


def note_origin(state: ServerState, fields: dict[str, Any]) -> None:
    """Notes where a save of all tables is, for workers that start later: it has what only they use."""
    if fields.get("tables") is None:
        with state.job.changed:
            state.job.origin = os.path.realpath(_dirname(fields))


def _load_all(state: ServerState, config: ServerConfig, ids: list[int], fields: dict[str, Any], load_id: str) -> int:
    rows = 0
    with _rows_without_records(state):
        try:
            with state.snapshots:
                for table_id in ids:
                    rows += _load(state, config, table_id, _dirname(fields))
        finally:
            state.forget_held(ids)
        note_origin(state, fields)
        if load_id:
            _note_done(state, load_id, rows)
        if config.folder is not None:
            write_snapshot(state, config.folder)
    return rows


@contextmanager
def _rows_without_records(state: ServerState) -> Iterator[None]:
    """Keeps the publisher away until a snapshot has the rows: a restart would not know which rows a sink has."""
    published = state.job.published
    with state.job.changed:
        published.whole = published.loading = True
        published.oldest = published.oldest or time.time()
    try:
        yield
    finally:
        with state.job.changed:
            published.loading = False
        state.on_unrecorded()


def _load(state: ServerState, config: ServerConfig, table_id: int, dirname: Path) -> int:
    table = state.tables[table_id]
    spec = state.job.specs[table_id]
    with table.order, table.gate.exclusive():
        if isinstance(table, ServedDense):
            load_dense(table.table, dirname, start=spec.get("start", 0), total=spec.get("total"))
            return table.table.config.size
        assert isinstance(table, ServedSparse)
        return load_checked_table(table.table, dirname, **_share(config.index, spec))


def _share(index: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns which rows of a save belong to server ``index``, as ``load_table`` takes it."""
    count = spec.get("num_servers", 1)
    routing = spec.get("routing", "range")
    if count == 1:
        return {}
    bounds = range_bounds(count)
    return {
        "mine": lambda keys: servers_of_keys(keys, count, routing) == index,
        "ranges": (bounds[index], bounds[index + 1]) if routing == "range" else None,
    }


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
