"""CsvTracker: a table with one row for each value, ``step,time,name,value``."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping

from fleet.trackers.line_file import LineFile
from fleet.trackers.tracker import RunInfo, Tracker

_HEAD = "step,time,name,value"


class CsvTracker(Tracker):
    """Writes ``<folder>/<run>.csv``; a row for each value, so that names may appear later and at other steps."""

    def start(self, run: RunInfo) -> None:
        """Opens the file; rows of steps that are trained once more are dropped."""
        first = run.first_step

        def keep(line: str) -> bool:
            step = line.partition(",")[0]
            return line == _HEAD or (step.isdigit() and (first is None or int(step) < first))

        self._file = LineFile(run.folder / f"{run.name}.csv", keep)
        if self._file.is_new:
            self._file.write(_HEAD)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes a row for each value."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        now = f"{time.time():.3f}"
        rows.writerows((step, now, name, repr(value)) for name, value in values.items())
        self._file.write(text.getvalue().rstrip("\n"))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
