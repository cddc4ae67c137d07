"""FolderSink: the rows of a job as safetensors files in a folder, and a manifest that says which of them count.

``MANIFEST.json`` names for each server its base, a file with every row, and the deltas after it, in order::

    {"format": 1, "job": "shop", "num_servers": 1, "values": "float32",
     "servers": {"0": {"history": "00000001-5f...", "watermark": 90, "step": 12, "pushed_at": 1e9,
                       "base": {"file": "rows-0-....safetensors", "bytes": 1, "crc32": 2, "rows": 3, "previous": 0,
                                "watermark": 70},
                       "deltas": [{... "previous": 70, "watermark": 90}]}}}

A file holds ``TABLE.keys`` (int64), ``TABLE.values`` (float32, bfloat16 or int8), ``TABLE.scales`` (with int8) and
``TABLE.deleted`` (int64) of each table. The manifest is replaced by one rename once all of it is on the disk, under a
lock that the servers of the job share. Files that neither the last two manifests nor a version name are removed; see
:mod:`fleet.ps.publishing.versions`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.common.plain_files import (
    NotPlainError,
    check_owner,
    flush,
    open_to_read,
    remove_stale,
    replace_file,
)
from fleet.errors import CheckpointError, ConfigError
from fleet.ps.publishing.delta import Delta, StaleDelta, check_position, encode
from fleet.ps.publishing.tensor_file import read_tensors, write_tensors
from fleet.ps.publishing.versions import MANIFEST, Mark, add_share, locked, rows_of_versions

_MOST_DELTAS = 512
_FEWEST_ROWS = 4096


class FolderSink:
    """Writes deltas into a folder.

    Deltas become a new base when they have more rows than half of the base's, or when there are many.

    Args:
        folder: where; made when missing.
        job: the job's name.
        values: how rows are stored.
        fewest_rows: deltas with fewer rows than this together do not become a base.
    """

    def __init__(self, folder: str | Path, job: str, values: str, *, fewest_rows: int = _FEWEST_ROWS) -> None:
        self._folder = Path(folder)
        self._job = job
        self._values = values
        self._fewest_rows = fewest_rows

    def position(self, server: int) -> tuple[str, int] | None:
        """Returns (history, watermark) of the rows that the folder holds of ``server``.

        Raises:
            ConfigError: the folder belongs to another job or another user, or holds rows in another form.
        """
        if self._folder.exists():
            _check_folder(self._folder)
        return _position(self._read(), server)

    def write(self, delta: Delta) -> None:
        """Adds ``delta``: its file, then the manifest that names it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _check_folder(self._folder)
        with locked(self._folder, ".lock"):
            manifest = self._read()
            check_position(delta, _position(manifest, delta.server))
            before = _files(manifest, delta.server)
            state = manifest["servers"].setdefault(str(delta.server), {"base": None, "deltas": []})
            entry = self._write_rows(delta.server, delta.previous, delta.watermark, self._tensors(delta))
            if delta.whole:
                state["base"] = entry
                state["deltas"] = []
                manifest["num_servers"] = delta.num_servers
                # A job that was started again with fewer servers has no rows on the others any more.
                for server in [s for s in manifest["servers"] if int(s) >= delta.num_servers]:
                    before |= _files(manifest, int(server))
                    del manifest["servers"][server]
            else:
                state["deltas"].append(entry)
            state.update(history=delta.history, watermark=delta.watermark, step=delta.step, pushed_at=delta.pushed_at)
            self._compact(delta.server, state)
            flush(self._folder)  # the names of the files, before the manifest that names them
            replace_file(self._folder / MANIFEST, json.dumps(manifest, indent=1))
            # The files of the manifest before this one stay: a reader may be opening them.
            self._remove_old(manifest, delta.server, before | _files(manifest, delta.server))

    def mark(self, server: int, mark: Mark, position: tuple[str, int] | None = None) -> None:
        """Names the rows that the folder has of ``server``, see :func:`fleet.ps.publishing.versions.add_share`.

        Raises:
            StaleDelta: they are not those of ``position``: the folder was removed, or is an older copy.
        """
        with locked(self._folder, ".lock"):
            manifest = self._read()
            held = _position(manifest, server)
            if held is None or position not in (None, held):
                raise StaleDelta(f"server {server} of job {self._job!r}: {self._folder} holds {held}, not {position}.")
            before = rows_of_versions(self._folder)
            add_share(self._folder, mark, server, manifest)
            named = rows_of_versions(self._folder).union(*(_files(manifest, int(s)) for s in manifest["servers"]))
            for name in before - named:
                (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open between deltas."""

    def _tensors(self, delta: Delta) -> dict[str, NDArray[Any]]:
        tensors: dict[str, NDArray[Any]] = {}
        for rows in delta.tables:
            stored, scales = encode(rows.values, self._values)
            tensors[f"{rows.table}.keys"] = rows.keys
            tensors[f"{rows.table}.values"] = stored
            if scales is not None:
                tensors[f"{rows.table}.scales"] = scales
            tensors[f"{rows.table}.deleted"] = rows.deleted
        return tensors

    def _write_rows(
        self, server: int, previous: int, watermark: int, tensors: dict[str, NDArray[Any]]
    ) -> dict[str, Any]:
        name = f"rows-{server}-{watermark:020d}-{secrets.token_hex(4)}.safetensors"
        size, checksum = write_tensors(self._folder / name, tensors, {"values": self._values})
        rows = sum(len(tensor) for name, tensor in tensors.items() if name.endswith((".keys", ".deleted")))
        counts = {"bytes": size, "crc32": checksum, "rows": rows}
        return {"file": name, **counts, "previous": previous, "watermark": watermark}

    def _compact(self, server: int, state: dict[str, Any]) -> None:
        """Makes base and deltas one new base where that is due."""
        base = state["base"]
        deltas = state["deltas"]
        rows = sum(entry["rows"] for entry in deltas)
        if len(deltas) < _MOST_DELTAS and rows <= max(base["rows"] // 2, self._fewest_rows):
            return
        parts = [read_tensors(self._folder / entry["file"]) for entry in (base, *deltas)]
        names = {name.removesuffix(".keys") for part in parts for name in part if name.endswith(".keys")}
        tensors: dict[str, NDArray[Any]] = {}
        for name in sorted(names):
            tensors.update(_latest(name, [part for part in parts if f"{name}.keys" in part]))
        state["base"] = self._write_rows(server, 0, state["watermark"], tensors)
        state["deltas"] = []

    # -- the manifest --------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        path = self._folder / MANIFEST
        try:
            with open_to_read(path) as file:
                manifest: dict[str, Any] = json.loads(file.read())
        except FileNotFoundError:
            return {"format": 1, "job": self._job, "num_servers": 0, "values": self._values, "servers": {}}
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}. Remove the folder; the next delta writes all rows.") from None
        for name, mine in (("format", 1), ("job", self._job), ("values", self._values)):
            if manifest.get(name) != mine:
                raise ConfigError(
                    f"{path} holds rows with {name} {manifest.get(name)!r}, this job publishes with {mine!r}. Give it "
                    "a folder of its own, or remove this one."
                )
        return manifest

    def _remove_old(self, manifest: dict[str, Any], server: int, kept: set[str]) -> None:
        """Removes files of ``server`` and of servers that the manifest dropped, unless ``kept`` or a version's."""
        remove_stale(self._folder / MANIFEST)
        kept = kept | rows_of_versions(self._folder)
        for path in self._folder.glob("rows-*-*.safetensors"):
            number = path.name.split("-")[1]
            is_due = number == str(server) or (number.isdigit() and number not in manifest["servers"])
            if is_due and path.name not in kept:
                path.unlink(missing_ok=True)


def _check_folder(folder: Path) -> None:
    try:
        check_owner(folder)
    except NotPlainError as error:
        raise ConfigError(
            f"publish({str(folder)!r}): {error.strerror}. Rows are published to a folder of one's own."
        ) from None


def _position(manifest: dict[str, Any], server: int) -> tuple[str, int] | None:
    state = manifest["servers"].get(str(server))
    return None if state is None else (state["history"], state["watermark"])


def _files(manifest: dict[str, Any], server: int) -> set[str]:
    state = manifest["servers"].get(str(server))
    entries = [] if state is None else [state["base"], *state["deltas"]]
    return {entry["file"] for entry in entries if entry is not None}


def _latest(name: str, parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Returns the tensors of table ``name`` with the newest row of each id in ``parts``, which go from old to new."""
    columns = [column for column in ("values", "scales") if f"{name}.{column}" in parts[0]]
    ids: list[NDArray[Any]] = []
    places: list[NDArray[Any]] = []  # of each id: the line of its row in all parts, or -1: deleted
    count = 0
    for part in parts:
        keys = part[f"{name}.keys"]
        deleted = part[f"{name}.deleted"]
        ids += [keys, deleted]
        places += [np.arange(count, count + len(keys)), np.full(len(deleted), -1)]
        count += len(keys)
    # unique() keeps the first of equal ids: newest first, that is the last change.
    newest_first = np.concatenate(ids)[::-1]
    keys, at = np.unique(newest_first, return_index=True)
    place = np.concatenate(places)[::-1][at]
    stays = place >= 0
    latest = {f"{name}.keys": keys[stays]}
    for column in columns:
        latest[f"{name}.{column}"] = np.concatenate([part[f"{name}.{column}"] for part in parts])[place[stays]]
    latest[f"{name}.deleted"] = np.empty(0, np.int64)
    return latest
