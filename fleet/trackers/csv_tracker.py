"""CsvTracker: a table with one row for each value, ``step,time,name,value``."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Mapping

from fleet.trackers.line_file import LineFile
from fleet.trackers.tracker import RunInfo, Tracker

_STEP = re.compile(r"[0-9]{1,18}")
_HEAD = "step,time,name,value"


class CsvTracker(Tracker):
    """Writes ``<folder>/<run>.csv``; each value has a row, since new names may appear at any step."""

    def start(self, run: RunInfo) -> None:
        """Opens the file; drops rows of steps that are trained again."""
        first = run.first_step

        def keep(line: str) -> bool:
            step = line.partition(",")[0]
            return line == _HEAD or (_STEP.fullmatch(step) is not None and (first is None or int(step) < first))

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
