"""What a parameter server and a worker measure of themselves, for the log and for metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.ps.publishing.row_cut import waiting_rows

if TYPE_CHECKING:
    from fleet.ps.server.server_state import ServerState
    from fleet.ps.worker.connection import WorkerConnection

Samples = Mapping[str, float] | Mapping[tuple[str, ...], float]  # by the value of the measure's label, or of each


@dataclass(frozen=True)
class Measure:
    """One metric: its name without prefix, its meaning, and its values by label, or one value without."""

    name: str
    meaning: str
    value: float = 0.0
    label: str | tuple[str, ...] = ""
    samples: Samples = field(default_factory=dict)
    grows: bool = False


def server_measures(state: ServerState) -> list[Measure]:
    """Returns the measures of a server now."""
    job = state.job
    counts = state.counts
    tables = {fact_name(table): table.describe() for table in state.tables.values()}
    with job.changed:
        clocks = {str(worker.rank): float(worker.clock) for worker in job.workers}
        active = [worker.clock for worker in job.active()] or [0]
        states = Counter(worker.state for worker in job.workers)
        moves = [worker.points.moves() for worker in job.workers]
        held = sum(map(len, job.held.values()))
        behind = state.journal.last_lsn - state.journal.durable_lsn if state.journal.level else 0
    # Only dense tables are set as a whole; what they hold are elements.
    elements = {name: float(facts["rows"]) for name, facts in tables.items() if "is_set" in facts}
    rows = {name: float(facts["rows"]) for name, facts in tables.items() if name not in elements}
    size, asked, hits, evicted = (
        {name: float(facts[key]) for name, facts in tables.items() if key in facts}
        for key in ("bytes", "asked", "found", "evicted")
    )
    return [
        Measure("asked_ids", "ids that pulls asked a table for", label="table", samples=asked, grows=True),
        Measure("found_ids", "ids of pulls that had a row", label="table", samples=hits, grows=True),
        Measure("table_rows", "rows of a table of ids on this server", label="table", samples=rows),
        Measure("table_elements", "elements of a dense table on this server", label="table", samples=elements),
        Measure("table_bytes", "memory of a table on this server", label="table", samples=size),
        Measure("evicted_rows", "rows that a table has lost to its limit", label="table", samples=evicted, grows=True),
        Measure("memory_bytes", "resident memory of the process", resident_bytes()),
        Measure("pulled_rows", "rows given to workers", counts["pulled"], grows=True),
        Measure("pulled_elements", "dense elements given to workers", counts["pulled_elements"], grows=True),
        Measure("pushed_rows", "rows changed", counts["rows"], grows=True),
        Measure("pushed_elements", "dense elements changed", counts["elements"], grows=True),
        Measure("changes", "messages applied", counts["applied"], grows=True),
        Measure("duplicates", "changes recognised as applied before", counts["duplicates"], grows=True),
        Measure("waiting_gradients", "gradients that wait for other workers (sync)", held),
        Measure("waiting_records", "journal records not on the disk yet (level 2)", behind),
        Measure("worker_steps", "steps pushed by a worker", label="worker", samples=clocks),
        Measure("staleness_steps", "steps between the fastest and the slowest worker", max(active) - min(active)),
        Measure("workers", "workers by state", label="state", samples={k: float(n) for k, n in states.items()}),
        *_stream_measures(moves),
        *_published_measures(state),
    ]


def _stream_measures(moves: Sequence[Mapping[tuple[str, str], tuple[int, float]]]) -> list[Measure]:
    """Returns how far streams are: of a partition that several workers have read, the furthest counts."""
    furthest: dict[tuple[str, ...], tuple[int, float]] = {}
    for known in moves:
        for place, move in known.items():
            furthest[place] = max(furthest.get(place, (-1, 0.0)), move)
    if not furthest:
        return []
    now, label = time.monotonic(), ("source", "partition")
    offsets = {place: float(offset) for place, (offset, _) in furthest.items()}
    ages = {place: max(0.0, now - since) for place, (_, since) in furthest.items()}
    return [
        Measure("stream_next_offset", "offset after the last event in a push", label=label, samples=offsets),
        Measure("stream_age_seconds", "time since a push brought new events", label=label, samples=ages),
    ]


def _published_measures(state: ServerState) -> list[Measure]:
    published = state.job.published
    if not published.on:
        return []
    counts = published.counts
    return [
        Measure("publish_lag_seconds", "age of the oldest change that the sink lacks", published.lag_s()),
        Measure("publish_waiting_rows", "rows and deletions that the sink lacks, at most", waiting_rows(state)),
        Measure("published_deltas", "deltas that the sink took", counts["deltas"], grows=True),
        Measure("published_rows", "rows that the sink took", counts["rows"], grows=True),
        Measure("published_deletions", "deletions that the sink took", counts["deletions"], grows=True),
        Measure("publish_failures", "deltas and questions that the sink did not take", counts["failures"], grows=True),
    ]


def worker_measures(connection: WorkerConnection) -> list[Measure]:
    """Returns the measures of a worker now."""
    waiting = {name: float(count) for name, count in connection.waiting().items()}
    return [
        Measure("memory_bytes", "resident memory of the process", resident_bytes()),
        Measure("steps", "steps taken by this worker", connection.client.step, grows=True),
        Measure("pulled_rows", "rows asked for", connection.pulled, grows=True),
        Measure("pushed_rows", "rows whose gradients were passed on", connection.plan.gathered, grows=True),
        Measure("waiting_gradients", "gradients in the queue of a table (async)", label="table", samples=waiting),
        Measure(
            "staleness_steps",
            "steps of this worker that the servers have not had yet",
            max(waiting.values(), default=0),
        ),
        *_lag_measures({} if connection.streams is None else connection.streams.lags()),
    ]


def _lag_measures(lags: Mapping[tuple[str, ...], float]) -> list[Measure]:
    label = ("source", "partition")
    return [Measure("stream_lag_events", "events that wait to be trained", label=label, samples=lags)] if lags else []


class Rates:
    """Rows, and elements of dense tables, that a server gives out and changes in a second."""

    def __init__(self, state: ServerState, now: float) -> None:
        self._state = state
        self._since = now
        self._before = dict(state.counts)

    def since_last(self, now: float) -> dict[str, float]:
        """Returns the rates since the last call, by the server's count."""
        counts = dict(self._state.counts)
        seconds = max(now - self._since, 1e-3)
        rates = {name: (count - self._before[name]) / seconds for name, count in counts.items()}
        self._since = now
        self._before = counts
        return rates


class Summary:
    """One line about a server: rows, memory, rows per second since the last line, queues, staleness."""

    def __init__(self, state: ServerState, now: float) -> None:
        self._state = state
        self._rates = Rates(state, now)

    def line(self, now: float) -> str | None:
        """Returns the line, or ``None`` when no row was pulled or pushed since the last call."""
        rates = self._rates.since_last(now)
        if not any(rates[name] for name in ("pulled", "pulled_elements", "rows", "elements")):
            return None
        found = {measure.name: measure for measure in server_measures(self._state)}
        rows, size = (sum(found[name].samples.values()) for name in ("table_rows", "table_bytes"))
        tables = len(found["table_rows"].samples)
        return (
            f"{rows:.0f} rows in {tables} table{'s' * (tables != 1)}, {size / 1e6:.1f} MB "
            f"(process {found['memory_bytes'].value / 1e6:.0f} MB); {rates['pulled']:.0f} rows/s pulled, "
            f"{rates['rows']:.0f} pushed; {found['waiting_gradients'].value:.0f} gradients wait; the slowest worker "
            f"is {found['staleness_steps'].value:.0f} steps behind"
        )


def fact_name(table: Any) -> str:
    """Returns the name of a served table."""
    return str(table.table.config.name)


def resident_bytes(process: int | str = "self") -> float:
    """Returns the resident memory of a process, by default this one; 0 where the system does not tell."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return 0.0
