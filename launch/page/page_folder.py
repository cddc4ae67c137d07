"""PageFolder: reads the files that the processes of this node write for the page, and looks at their checkpoints.

The files are described in ``fleet/trackers/page_trackers.py``. The user's own program writes them, so a file of another
form is passed over.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import open_to_read

_MAX_BYTES = 1 << 20
_MAX_NAMES = 64  # of curves
_MAX_VALUES = 1000  # of one worker, of one table, of servers
_MAX_CHARACTERS = 200  # of a name
_MAX_DIGITS = 18  # of an integer
_MAX_POINTS = 20_000
_CHECKPOINTS = 8
_MAX_LOOKED_AT = 100
_COMPLETE = ("index.json", "manifest.json")
Record = TypeVar("Record")
_ANSWER_S = 0.5
_MAX_WAITING = 8  # looks at folders that do not answer


@dataclass(frozen=True)
class ProgressRecord:
    """How far a worker of a run of known length was at the time ``at``, in seconds since the epoch."""

    step: float
    total_steps: float
    at: float
    left_s: float | None = None  # None: no rate is known yet


@dataclass(frozen=True)
class WorkerRecord:
    """The newest values of one worker."""

    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    checkpoints: Path | None = None
    progress: ProgressRecord | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """One complete checkpoint in a folder."""

    path: Path
    saved_at: float  # seconds since the epoch
    num_bytes: int


@dataclass(frozen=True)
class ServerRecord:
    """The measures of one shard of a parameter server: values by table, and totals."""

    tables: dict[str, dict[str, float]]
    totals: dict[str, float]


class PageFolder:
    """The folder of one page; used by one thread at a time.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Files from before this time were written by earlier workers of the same ranks.
        self.since_ns = 0
        self._known: dict[str, tuple[int, Any]] = {}  # the time of a file in ns, and the record that it holds
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._curves_read = 0

    def worker(self, rank: int) -> WorkerRecord:
        """Returns the last record of the worker of ``rank``."""
        return self._read(f"{self.path}/worker.{rank}.json", _worker_of, self.since_ns) or WorkerRecord()

    def servers(self) -> dict[int, list[ServerRecord]]:
        """Returns the measures of each parameter server of this node, one record for each shard that it serves."""
        found: dict[int, list[ServerRecord]] = {}
        for path in sorted(self.path.glob("server.*.*.json"))[:_MAX_VALUES]:
            index = path.name.split(".")[1]
            if index.isdecimal() and (record := self._read(str(path), _server_of)) is not None:
                found.setdefault(int(index), []).append(record)
        return found

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the points of each curve, by step; a step that was trained again stands once."""
        with contextlib.suppress(OSError), open_to_read(self.path / "curves.jsonl") as file:
            file.seek(self._curves_read)
            block = file.read(8 * _MAX_BYTES)
            end = block.rfind(b"\n") + 1
            if not end and len(block) == 8 * _MAX_BYTES:
                # A line longer than any point is passed over, or the lines behind it would never be read.
                end = len(block)
            self._curves_read += end
            for line in block[:end].split(b"\n"):
                if len(line) <= _MAX_BYTES:
                    self._add_points(line)
        return self._curves

    def _read(self, path: str, make: Callable[[dict[str, Any]], Record], since_ns: int = 0) -> Record | None:
        """Returns the record of the JSON object in ``path``, the same until the file changes; None where none is."""
        try:
            changed_ns = os.lstat(path).st_mtime_ns
        except OSError:
            return None
        if changed_ns < since_ns:
            return None
        if path not in self._known or self._known[path][0] != changed_ns:
            found: Any = None
            with contextlib.suppress(OSError), open_to_read(path) as file:
                found = _loaded(file.read(_MAX_BYTES))
            self._known[path] = changed_ns, make(found) if isinstance(found, dict) else None
        record: Record | None = self._known[path][1]
        return record

    def _add_points(self, line: bytes) -> None:
        found = _loaded(line)
        if not isinstance(found, dict) or not isinstance(step := found.get("step"), int):
            return
        values = _numbers(found.get("values"))
        for name, value in values.items():
            if name not in self._curves and len(self._curves) == _MAX_NAMES:
                continue
            points = self._curves.setdefault(name, [])
            while points and points[-1][0] >= step:
                # After a restart the steps since the checkpoint are trained again, and their new points replace the
                # old ones.
                points.pop()
            points.append((step, value))
            if len(points) > _MAX_POINTS:
                del points[1::2]


def newest_checkpoints(folder: Path) -> list[CheckpointRecord]:
    """Returns the newest complete checkpoints of ``folder``, newest first."""
    found: list[CheckpointRecord] = []
    # ValueError: the worker published a path with a NUL.
    with contextlib.suppress(OSError, ValueError):
        names = sorted((name for name in os.listdir(folder) if name.startswith("step-")), reverse=True)
        for path in (folder / name for name in names[:_MAX_LOOKED_AT]):
            if len(found) < _CHECKPOINTS and any((path / name).exists() for name in _COMPLETE):
                with contextlib.suppress(OSError):
                    sizes = [entry.stat().st_size for entry in os.scandir(path) if entry.is_file()]
                    found.append(CheckpointRecord(path, path.stat().st_mtime, sum(sizes)))
    return found


def _loaded(data: bytes) -> Any:
    """Returns the JSON value of ``data``, with long integers as floats; None for other bytes."""
    try:
        return json.loads(data, parse_int=lambda text: int(text) if len(text) <= _MAX_DIGITS else float(text))
    except (ValueError, RecursionError):
        return None


def _worker_of(found: dict[str, Any]) -> WorkerRecord:
    step = found.get("step")
    checkpoints = found.get("checkpoints")
    return WorkerRecord(
        step=step if isinstance(step, int) else 0,
        values=_numbers(found.get("values")),
        checkpoints=Path(checkpoints) if isinstance(checkpoints, str) else None,
        progress=_progress_of(_numbers(found.get("progress"))),
    )


def _progress_of(found: Mapping[str, float]) -> ProgressRecord | None:
    step, total_steps, at, left_s = (found.get(name, math.nan) for name in ("step", "total_steps", "at", "left_s"))
    if not all(map(math.isfinite, (step, total_steps, at))) or total_steps < 1:
        return None
    return ProgressRecord(step, total_steps, at, left_s if math.isfinite(left_s) else None)


def _server_of(found: dict[str, Any]) -> ServerRecord | None:
    tables = found.get("tables")
    if not isinstance(tables, dict):
        return None
    named = {name[:_MAX_CHARACTERS]: _numbers(values) for name, values in islice(tables.items(), _MAX_VALUES)}
    return ServerRecord(named, _numbers(found.get("totals")))


def _numbers(found: Any) -> dict[str, float]:
    pairs = islice(found.items(), _MAX_VALUES) if isinstance(found, dict) else ()
    return {name[:_MAX_CHARACTERS]: float(value) for name, value in pairs if isinstance(value, (int, float))}


class CheckpointLooks:
    """One thread looks at a folder, however many ask; nobody waits for it longer than ``_ANSWER_S``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: dict[Path, OwnThread] = {}

    def newest(self, folder: Path) -> list[CheckpointRecord]:
        """Returns the newest complete checkpoints of ``folder``, newest first.

        Raises:
            TimeoutError: the folder does not answer.
        """
        with self._lock:
            self._looks = {path: look for path, look in self._looks.items() if look.is_alive()}
            look = self._looks.get(folder)
            if look is None and len(self._looks) < _MAX_WAITING:
                look = OwnThread(newest_checkpoints, folder, name="page checkpoints", say=None)
                self._looks[folder] = look
                look.start()
        if look is not None:
            look.join(_ANSWER_S)
        if look is None or look.is_alive():
            raise TimeoutError(f"{folder} has not answered within {_ANSWER_S:g} s")
        found: list[CheckpointRecord] = look.result()
        return found
