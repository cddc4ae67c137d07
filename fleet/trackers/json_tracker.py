"""JsonTracker: one JSON object a line, ``{"step": 3, "time": 1767225600.5, "loss": 0.25}``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping

from fleet.trackers.line_file import LineFile
from fleet.trackers.tracker import RunInfo, Tracker


class JsonTracker(Tracker):
    """Writes ``<folder>/<run>.jsonl``; JSON has no NaN and no infinities, so these are written as null."""

    def start(self, run: RunInfo) -> None:
        """Opens the file; drops lines of steps that are trained again."""
        first = run.first_step

        def keep(line: str) -> bool:
            try:
                return first is None or bool(json.loads(line)["step"] < first)
            except (ValueError, KeyError, TypeError, RecursionError):
                return False

        self._file = LineFile(run.folder / f"{run.name}.jsonl", keep)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes a line."""
        known = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **known}))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
