"""PageFolder: reads what the processes of this node write for the page.

The files are described in ``fleet/trackers/page_trackers.py``. Who writes them is the user's own program, so whatever
is not of the form is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.launch.processes.logs import PLAIN

_MAX_BYTES = 1 << 20
_MAX_NAMES = 64
_MAX_POINTS = 20_000
_CHECKPOINTS = 8
_COMPLETE = ("index.json", "manifest.json")


@dataclass(frozen=True)
class WorkerRecord:
    """The newest values of one worker."""

    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    checkpoints: Path | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """One complete checkpoint in a folder."""

    path: Path
    saved_at: float  # seconds since the epoch
    num_bytes: int


@dataclass(frozen=True)
class ServerRecord:
    """What a parameter server measured of one shard: values by table, and those of the whole."""

    tables: dict[str, dict[str, float]]
    totals: dict[str, float]


class PageFolder:
    """The folder of one page; used by one thread at a time.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, tuple[int, Any]] = {}  # the time of a file in ns, and what it held
        self._workers: dict[int, tuple[dict[str, Any], WorkerRecord]] = {}  # what the file held, and the record of it
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._curves_read = 0

    def worker(self, rank: int) -> WorkerRecord:
        """Returns what the worker of ``rank`` wrote last."""
        found = self._read(f"{self.path}/worker.{rank}.json")
        if rank in self._workers and self._workers[rank][0] is found:
            return self._workers[rank][1]
        step, values, checkpoints = found.get("step"), found.get("values"), found.get("checkpoints")
        record = WorkerRecord(
            step=step if isinstance(step, int) else 0,
            values=_numbers(values),
            checkpoints=Path(checkpoints) if isinstance(checkpoints, str) else None,
        )
        self._workers[rank] = found, record
        return record

    def servers(self) -> dict[int, list[ServerRecord]]:
        """Returns the measures of each parameter server of this node, one record for each shard that it serves."""
        found: dict[int, list[ServerRecord]] = {}
        for path in sorted(self.path.glob("server.*.*.json")):
            index = path.name.split(".")[1]
            record = self._read(str(path))
            if index.isdecimal() and isinstance(record.get("tables"), dict):
                tables = {str(name): _numbers(values) for name, values in record["tables"].items()}
                found.setdefault(int(index), []).append(ServerRecord(tables, _numbers(record.get("totals"))))
        return found

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Returns the points of each curve, by step; a step that was trained again stands once."""
        with contextlib.suppress(OSError), open(_open(self.path / "curves.jsonl"), "rb") as file:
            file.seek(self._curves_read)
            for line in file.read(8 * _MAX_BYTES).splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                self._curves_read += len(line)
                self._add_points(line)
        return self._curves

    def checkpoints(self, folder: Path) -> list[CheckpointRecord]:
        """Returns the newest complete checkpoints of ``folder``, newest first."""
        found: list[CheckpointRecord] = []
        with contextlib.suppress(OSError):
            names = sorted((name for name in os.listdir(folder) if name.startswith("step-")), reverse=True)
            for path in (folder / name for name in names):
                if len(found) < _CHECKPOINTS and any((path / name).exists() for name in _COMPLETE):
                    with contextlib.suppress(OSError):
                        sizes = [entry.stat().st_size for entry in os.scandir(path) if entry.is_file()]
                        found.append(CheckpointRecord(path, path.stat().st_mtime, sum(sizes)))
        return found

    def forget_workers(self) -> None:
        """Removes what workers wrote, before others take their ranks."""
        for path in self.path.glob("worker.*.json"):
            path.unlink(missing_ok=True)

    def _read(self, path: str) -> dict[str, Any]:
        """Returns the JSON object in ``path``, the same until the file changes; empty where there is none."""
        try:
            changed_ns = os.stat(path).st_mtime_ns
        except OSError:
            return {}
        if path in self._known and self._known[path][0] == changed_ns:
            found = self._known[path][1]
        else:
            found = {}
            with contextlib.suppress(OSError, ValueError, RecursionError), open(_open(Path(path)), "rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
            self._known[path] = (changed_ns, found)
        return found if isinstance(found, dict) else {}

    def _add_points(self, line: bytes) -> None:
        try:
            found = json.loads(line)
            step, values = found["step"], _numbers(found["values"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return
        if not isinstance(step, int):
            return
        for name, value in values.items():
            if name not in self._curves and len(self._curves) == _MAX_NAMES:
                continue
            points = self._curves.setdefault(name, [])
            while points and points[-1][0] >= step:
                points.pop()  # trained again after a restart
            points.append((step, value))
            if len(points) > _MAX_POINTS:
                del points[1::2]


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | PLAIN)


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {str(name): float(value) for name, value in found.items() if isinstance(value, (int, float))}
