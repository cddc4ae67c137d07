"""Snapshots of a whole server while it serves, and the way back: snapshot, then the journal's newer records.

A snapshot first copies the state of the job at one record and starts a new journal segment there. Then it copies the
tables chunk by chunk, each chunk with the number of the last record it holds. A restart applies to each row exactly the
records it does not hold. A snapshot appears under its name only when it is complete, and every record that its rows
hold is durable: if one were lost, the row would get the change twice when it is sent again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleet.common.plain_files import create, flush
from fleet.errors import CheckpointError, PSError
from fleet.ps.files.chunks import read_chunks, write_chunk, write_end
from fleet.ps.files.own_folder import own_folder
from fleet.ps.files.row_file import open_plain
from fleet.ps.server.job_state import Held, JobState
from fleet.ps.server.journal import read_journal
from fleet.ps.server.served_table import ServedSparse, ServedTable, Stamps
from fleet.ps.server.server_state import ServerState

_VERSION = 1
_JOB_STATE = "session.bin"
_JSON, _HELD, _RECORDED, _DELETED = 1, 2, 3, 4


def write_snapshot(state: ServerState, folder: Path) -> Path:
    """Writes a snapshot of ``state`` under ``folder``, drops the journal that it replaces, and returns its path."""
    with state.snapshots:
        job = state.job
        journal = state.journal

        def stamp() -> int:
            # A server that failed has a record that its tables lack; a stamp would claim that the rows hold it.
            if job.stopped:
                raise PSError("the server ends; the journal has everything that this snapshot would hold.")
            return journal.last_lsn

        # One lock for both: the captured state holds exactly the records before the new segment.
        with journal.lock:
            lsn = journal.rotate()
            captured = _capture(job)
            tables = dict(state.tables)
        captured["level"] = journal.level
        captured["learning_rates"] = {str(table_id): table.learning_rate for table_id, table in tables.items()}
        captured |= _capture_sparse(tables)
        target = _next_name(folder, lsn)
        draft = folder / f".{target.name}.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            own_folder(folder)
            draft.mkdir(mode=0o700)  # like the journal, for the server's user only
            _write_job_state(draft / _JOB_STATE, captured, lsn)
            for table_id, table in tables.items():
                table.write(_table_path(draft, table_id), stamp)
            _flush(draft)
            journal.sync()  # rows may hold records after ``lsn``: durable before the snapshot has its name
            draft.rename(target)
        except BaseException:  # a full disk, which a half-written snapshot would keep full
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(folder)
        for path in _snapshots(folder):  # only now that the name of the new one is on the disk
            if path != target:
                _remove(path)
        journal.snapshot_done(lsn)
    return target


def _capture_sparse(tables: Mapping[int, ServedTable]) -> dict[str, Any]:
    sparse = {key: table for key, table in tables.items() if isinstance(table, ServedSparse)}
    return {
        "days": {str(key): table.day for key, table in sparse.items()},
        "chains": {key: (table.table.chain.saves, table.table.chain.deleted) for key, table in sparse.items()},
    }


def _next_name(folder: Path, lsn: int) -> Path:
    """Returns the path of a snapshot; loading and saving change rows without a record, so one may have its number."""
    numbers = [int(path.name.rpartition("-")[2]) for path in folder.glob(f"snapshot-{lsn:020d}-*")]
    return folder / f"snapshot-{lsn:020d}-{max(numbers, default=0) + 1:06d}"


def _table_path(folder: Path, table_id: int) -> Path:
    return folder / f"table-{table_id}.rows"


def _capture(job: JobState) -> dict[str, Any]:
    workers = [
        {
            "clock": worker.clock,
            "gone": worker.state == "gone",
            "steps": {str(table): step for table, step in worker.steps.items()},
            "channels": {str(number): channel.last for number, channel in worker.channels.items()},
            "points": worker.points.as_json(),
        }
        for worker in job.workers
    ]
    # All of these are copies: the job changes again as soon as the caller lets go of the lock.
    return {
        "version": _VERSION,
        "job": job.name,
        "num_workers": job.num_workers,
        "workers": workers,
        "specs": {str(table): spec for table, spec in job.specs.items()},
        "applied_step": job.applied_step,
        "barriers": dict(job.barriers),
        "keys": dict(job.keys),
        "saved": dict(job.saved),
        "origin": job.origin,
        "held": [(step, rank, held) for step, ranks in job.held.items() for rank, held in ranks.items()],
        "recorded": sorted(job.recorder.capture().items()),
        "published": _capture_published(job),
    }


def _capture_published(job: JobState) -> dict[str, Any]:
    kept = job.published
    return {
        "history": kept.history,
        "kept_for": kept.kept_for,
        "confirmed": kept.confirmed,
        # The delta that is being written may never arrive, so after a restart the next one is whole as well.
        "whole": kept.whole or kept.writing_whole,
    }


def _write_job_state(path: Path, captured: dict[str, Any], lsn: int) -> None:
    held = captured.pop("held")
    recorded = captured.pop("recorded")
    chains = captured.pop("chains")
    captured["held"] = [(step, rank, item.n_tables, item.flags) for step, rank, item in held]
    captured["recorded"] = [place for place, _ in recorded]
    captured["chains"] = [(key, saves) for key, (saves, _) in chains.items()]
    with create(path, 0o600) as file:
        write_chunk(file, 1, lsn, 0, _JSON, json.dumps(captured).encode())
        # The reader matches chunks with the lists in the JSON head by their order.
        for _, _, item in held:
            write_chunk(file, 1, lsn, 0, _HELD, item.body)
        for _, keys in recorded:
            write_chunk(file, len(keys), lsn, 0, _RECORDED, keys.tobytes())
        for _, deleted in chains.values():
            write_chunk(file, len(deleted), lsn, 0, _DELETED, deleted.tobytes())
        write_end(file)


def _flush(draft: Path) -> None:
    for path in draft.iterdir():
        flush(path)
    flush(draft)


def _remove(path: Path) -> None:
    """Removes a snapshot; if the process dies before the end, nothing is left that looks like one."""
    grave = path.with_name(f".{path.name}.tmp")
    path.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def _snapshots(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("snapshot-*") if path.is_dir() and not path.is_symlink())


def drop_snapshots(folder: Path) -> None:
    """Removes every snapshot in ``folder``, complete or not."""
    for path in _snapshots(folder):
        _remove(path)
    for draft in folder.glob(".snapshot-*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)


def has_snapshot(folder: Path) -> bool:
    """Returns whether ``folder`` holds a complete snapshot."""
    return bool(_snapshots(folder))


def is_lost(folder: Path, state: ServerState) -> bool:
    """Returns whether somebody has removed the journal's file, or the only snapshot: a restart needs both."""
    journal = state.journal
    return journal.is_lost() or (journal.in_snapshot is not None and not has_snapshot(folder))


def recover(folder: Path, state: ServerState, *, skips_damage: bool = False) -> list[str]:
    """Restores the empty ``state`` from ``folder``; returns lines about it for the log.

    At level 2 nothing may be missing. At the others the records are applied as far as the disk has them, and a line
    says where they end. With ``skips_damage`` that is so at every level, and behind damage as well.

    Raises:
        ConfigError: a part of the folder does not belong to this user alone.
        CheckpointError: the snapshot or the journal is damaged, or belongs to another number of workers.
    """
    for draft in folder.glob(".snapshot-*.tmp"):
        shutil.rmtree(draft, ignore_errors=True)
    lines: list[str] = []
    stamps: dict[int, Stamps] = {}
    count = 0
    journal = state.journal
    lsn = 0
    exact = journal.level == 2 and not skips_damage
    snapshots = _snapshots(folder)
    if snapshots:
        lsn, level, stamps = read_snapshot(snapshots[-1], state)
        exact = exact and level == 2
        lines.append(f"read {snapshots[-1].name}: {len(stamps)} tables")
        journal.in_snapshot = lsn
    journal.last_lsn = lsn
    known = max([lsn, *(stamp.latest for stamp in stamps.values())])
    own_folder(folder / "journal")
    records = read_journal(folder / "journal", lsn, lines, known=known, exact=exact, skips_damage=skips_damage)
    for record in records:
        state.replay(record, stamps)
        journal.last_lsn = record.lsn
        count += 1
    if count:
        lines.append(f"replayed {count} records of the journal")
    if journal.last_lsn < known:
        missing = f"the snapshot has rows up to record {known}, the journal ends with {journal.last_lsn}"
        if exact:
            raise CheckpointError(
                f"{folder}: {missing}: the disk has lost what it had confirmed. Restore the whole folder, start with "
                "an empty one, or start once with FLEET_PS_SKIP_DAMAGE=1 to continue without what is missing."
            )
        if journal.level:
            lines.append(f"the last seconds before the machine stopped are missing: {missing}")
        journal.last_lsn = known  # or the next records would have numbers that rows already hold
    return lines


def read_snapshot(path: Path, state: ServerState) -> tuple[int, int, dict[int, Stamps]]:
    """Fills ``state``; returns the snapshot's record, the level it was written at, and what its rows hold."""
    own_folder(path)
    lsn, fields = _read_job_state(path / _JOB_STATE, state.job)
    rates = fields["learning_rates"]
    days = fields["days"]
    stamps = {}
    for table_id, spec in state.job.specs.items():
        table = state.make_table(spec)
        stamps[table_id] = table.read(_table_path(path, table_id))
        rate = rates[str(table_id)]
        if rate is not None:
            table.set_learning_rate(rate)
        if isinstance(table, ServedSparse):
            table.day = days[str(table_id)]
        state.adopt(table_id, table)
    for table_id, saves, deleted in fields["chains"]:
        sparse = state.tables[int(table_id)]
        assert isinstance(sparse, ServedSparse)
        sparse.table.chain.begin(saves, deleted)
    return lsn, fields["level"], stamps


def _read_job_state(path: Path, job: JobState) -> tuple[int, dict[str, Any]]:
    chunks = list(read_chunks_of(path))
    if not chunks or chunks[0][3] != _JSON:
        raise CheckpointError(f"{path}: this is not the state of a parameter server.")
    lsn = chunks[0][1]
    fields = json.loads(chunks[0][4])
    if fields["version"] != _VERSION:
        raise CheckpointError(f"{path}: version {fields['version']!r}; this program reads version {_VERSION}.")
    if fields["num_workers"] != job.num_workers:
        raise CheckpointError(
            f"{path}: the folder belongs to a job of {fields['num_workers']} workers, this one has "
            f"{job.num_workers}. Save the model and load it into a job with an empty folder."
        )
    if fields["job"] != job.name:
        raise CheckpointError(
            f"{path}: the folder belongs to job {fields['job']!r}, this is job {job.name!r}. Give each job a "
            "folder of its own."
        )
    _restore_workers(job, fields["workers"])
    job.specs = {int(table): spec for table, spec in fields["specs"].items()}
    job.applied_step = fields["applied_step"]
    job.barriers = fields["barriers"]
    job.saved = fields["saved"]
    job.origin = fields["origin"]
    job.keys = fields["keys"]
    payloads = [chunk[4] for chunk in chunks[1:]]
    for step, rank, n_tables, flags in fields["held"]:
        job.held.setdefault(step, {})[rank] = Held(n_tables, flags, payloads.pop(0))
    arrays = [np.frombuffer(payload, np.int64) for payload in payloads]
    count = len(fields["recorded"])
    job.recorder.restore({(rank, table): keys for (rank, table), keys in zip(fields["recorded"], arrays, strict=False)})
    fields["chains"] = [(*chain, keys) for chain, keys in zip(fields["chains"], arrays[count:], strict=True)]
    _restore_published(job, fields["published"])
    return lsn, fields


def _restore_workers(job: JobState, found: list[dict[str, Any]]) -> None:
    for worker, known in zip(job.workers, found, strict=True):
        worker.clock = known["clock"]
        # Nobody is connected yet; the server makes the ranks with channels active when it is ready, so that their
        # leases run.
        worker.state = "gone" if known["gone"] else "expected"
        worker.steps = {int(table): step for table, step in known["steps"].items()}
        worker.points.restore(known["points"])
        for number, last in known["channels"].items():
            channel = worker.channel(int(number))
            # Whatever a snapshot holds counts as durable, see Journal.snapshot_done().
            channel.last = channel.durable = last


def _restore_published(job: JobState, known: dict[str, Any]) -> None:
    job.published.begin(known["history"], tuple(known["kept_for"]), known["confirmed"])
    job.published.whole = known["whole"]


def read_chunks_of(path: Path) -> list[tuple[int, int, int, int, bytes]]:
    """Returns all chunks of a small file."""
    with open_plain(path) as file:
        return list(read_chunks(file, path))
