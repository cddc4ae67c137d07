"""RankPage and CurvePage: the files of a worker for the page of the job, which the launcher's ``--page`` serves.

[Note: The folder of the page]
FLEET_PAGE_FOLDER names a folder that the launcher made. The processes of the node write there, and the launcher reads:

- ``worker.R.json``, by the worker of rank R: this worker's newest step and values, the folder of its checkpoints and,
  where the number of steps is known, how far it is.
- ``curves.jsonl``, by worker 0: values of the job, a line for each step that is worth a point.
- ``server.I.N.json``, by parameter server I: the measures of its tables (``fleet/ps_job/server_metrics.py``).

A JSON file is replaced as a whole, so a reader never sees half of one. The curves only grow: a point is written when at
least 1/500 of the time of the run has passed since the last one of that name, so a run of a week has some 7,000.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.common.plain_files import open_own, replace_file
from fleet.trackers.progress import Progress
from fleet.trackers.tracker import RunInfo, Tracker

_PERIOD_S = 0.5
_SHARE = 1 / 500


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces ``path`` by ``record`` as JSON."""
    replace_file(path, json.dumps(record), is_durable=False)


class RankPage(Tracker):
    """Keeps the newest values of this worker in one file, written at most twice a second.

    Args:
        folder: the folder of the page.
        progress: of the run.
    """

    every_rank = True

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._values: dict[str, float] = {}
        self._step = 0
        self._written_at = 0.0
        self.checkpoints: Path | None = None  # where this worker's checkpoints lie

    def start(self, run: RunInfo) -> None:
        """Notes the rank."""
        self._path = self._folder / f"worker.{run.rank}.json"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keeps ``values`` beside the values of other names."""
        self._values.update(values)
        self._step = step
        self._progress.note(step)
        if time.monotonic() - self._written_at >= _PERIOD_S:
            self._write()

    def close(self) -> None:
        """Writes the values once more, since the last ones may be newer than the file."""
        self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        checkpoints = None if self.checkpoints is None else str(self.checkpoints)
        record: dict[str, Any] = {"step": self._step, "values": self._values, "checkpoints": checkpoints}
        if self._progress.total_steps:
            step = self._progress.step
            record["progress"] = {"step": step, "total_steps": self._progress.total_steps, "at": time.time()}
            left_s = self._progress.left_s(step)
            record["progress"] |= {} if left_s is None else {"left_s": left_s}
        write_record(self._path, record)


class CurvePage(Tracker):
    """Appends points of the job's curves to ``curves.jsonl``.

    Args:
        folder: the folder of the page.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "curves.jsonl"
        self._began_at = time.monotonic()
        self._last_at: dict[str, float] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Appends the values whose last point is old enough."""
        now = time.monotonic()
        apart_s = (now - self._began_at) * _SHARE
        due = {name: value for name, value in values.items() if now - self._last_at.get(name, -apart_s) >= apart_s}
        if due:
            self._last_at.update(dict.fromkeys(due, now))
            with open(open_own(self._path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'step': step, 'values': due})}\n")
