"""What a parameter server writes for the page of the job (see ``fleet/trackers/page_trackers.py``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.env import Environment
from fleet.ps.server.measures import server_measures
from fleet.trackers.page_trackers import write_record

if TYPE_CHECKING:
    from fleet.ps.server.server_state import ServerState

_PERIOD_S = 1.0
_numbers = count()  # a process may serve several shards


def write_server_page(state: ServerState, index: int, environment: Environment) -> Callable[[], None]:
    """Writes the measures of server ``index`` once a second where the job has a page.

    Returns:
        What ends that and removes the file: this process may not be the one that serves these rows any longer.
    """
    folder = environment.raw("FLEET_PAGE_FOLDER")
    if folder is None:
        return lambda: None
    path, ended = Path(folder) / f"server.{index}.{next(_numbers)}.json", threading.Event()

    def write() -> None:
        rates = _Rates(state)
        while True:
            with suppress(OSError):  # a full disk ends no server
                record = _record(state)
                record["totals"].update(rates.take())
                write_record(path, record)
            if ended.wait(_PERIOD_S):
                return

    thread = threading.Thread(target=write, name="fleet-page", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        with suppress(OSError):
            path.unlink()

    return end


class _Rates:
    """Rows per second since the last look."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._at, self._before = time.monotonic(), dict(state.counts)

    def take(self) -> dict[str, float]:
        at, counts = time.monotonic(), dict(self._state.counts)
        seconds = max(at - self._at, 1e-3)
        names = {"pulled_rows_per_s": "pulled", "pushed_rows_per_s": "rows"}
        rates = {name: (counts[key] - self._before[key]) / seconds for name, key in names.items()}
        self._at, self._before = at, counts
        return rates


def _record(state: ServerState) -> dict[str, dict[str, Any]]:
    """Returns the measures that the page shows: values by table, and those of the whole server."""
    tables: dict[str, dict[str, float]] = {}
    totals: dict[str, float] = {}
    for measure in server_measures(state):
        if measure.label == "table":
            for table, value in measure.samples.items():
                tables.setdefault(str(table), {})[measure.name] = value
        elif not measure.label:
            totals[measure.name] = measure.value
        elif measure.name.startswith("stream_"):
            totals[measure.name] = max(measure.samples.values(), default=0.0)
    return {"tables": tables, "totals": totals}
