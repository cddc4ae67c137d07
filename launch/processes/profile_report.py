"""``--profile``: the steps that it names, and the report: a trace for Perfetto, a table of the steps, stragglers."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median_low
from typing import Any, TextIO

from fleet.common.plain_files import open_to_read, replace_file, replacing
from fleet.errors import ConfigError
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import PROFILE_FOLDER, LaunchLog

PROFILE = "FLEET_PROFILE"
_MOST = 1000  # a trace of more steps does not open in a browser
PARTS = ("data", "forward", "backward", "exchange", "update", "other")
TRACE, TABLE = "trace.json", "table.txt"
# A worker whose own part of a step takes this many times the median is named.
_SLOW = 1.2
# Numbers of rows that are no threads; those of threads are smaller.
_STEPS_ROW, _PARTS_ROW, _DEVICE_ROWS = 10_000_000, 10_000_001, 10_000_002
_NS_PER_US, _NS_PER_MS = 1e3, 1e6


def read_range(text: str, source: str) -> tuple[int, int]:
    """Returns the first step and the one before which profiling ends; ``source`` names the text in the error.

    Example:
        >>> read_range("10:13", "--profile")
        (10, 13)
    """
    found = re.fullmatch(r"\s*(\d{1,12}):(\d{1,12})\s*", text)
    if found is None:
        raise ConfigError(
            f"{source} is {text!r:.80}; it takes FIRST:LAST, numbers of steps counted from 0, as in 10:13 for the "
            "steps 10, 11 and 12."
        )
    first, last = int(found[1]), int(found[2])
    if not first < last <= first + _MOST:
        raise ConfigError(
            f"{source} is {text!r:.80}; FIRST:LAST means the steps from FIRST up to LAST, which is not among them, so "
            f"LAST is greater than FIRST, by {_MOST} at most."
        )
    return first, last


def show_profile(config: LaunchConfig, log: LaunchLog) -> None:
    """Writes the report of a job that has ended, on this node, and shows it; a failure costs the report alone."""
    folder = config.logs.folder.absolute() / PROFILE_FOLDER
    try:
        table = write_report(folder)
    except Exception as error:
        # The workers may have written anything, and may have been killed while they wrote.
        log.warning(f"--profile: no report was made of the files in {folder}: {error!r:.300}")
        return
    if table:
        log.plain(table)
    else:
        log.warning(
            f"--profile {config.logs.profile}: no worker of this node has finished one of these steps, so "
            "there is nothing to show. A step is a call of an optimizer's step(); fleet.distributed_optimizer() counts "
            "them from 0."
        )


def write_report(folder: Path) -> str:
    """Merges the files of the workers in ``folder`` and returns the table; an empty text when there are none."""
    workers = read_workers(folder)
    if not workers:
        return ""
    trace = folder / TRACE
    with replacing(trace, is_durable=False) as file:
        text = io.TextIOWrapper(file, "utf-8")
        merge(workers, folder, text)
        text.detach()
    table = "\n".join([*table_lines(workers), *straggler_lines(workers), f"Trace, for Perfetto: {trace}"])
    replace_file(folder / TABLE, f"{table}\n", is_durable=False)
    for worker in workers:
        _trace_of(folder, worker).unlink(missing_ok=True)
    return table


def read_workers(folder: Path) -> list[dict[str, Any]]:
    """Returns the record of each worker that finished a step, in the order of ranks."""
    found = [_read(path) for path in folder.glob("rank*.steps.json")]
    return sorted((worker for worker in found if worker["steps"]), key=lambda worker: int(worker["rank"]))


def _read(path: Path) -> Any:
    with open_to_read(path) as file:
        return json.loads(file.read())


def merge(workers: Sequence[dict[str, Any]], folder: Path, file: TextIO) -> None:
    """Writes one trace in Chrome's form, with a process for each rank; the clocks are those of the workers' hosts."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    comma = ""
    zero_ns = min(int(worker["steps"][0]["begin_ns"]) for worker in workers)
    for worker in workers:
        for event in (*_own_events(worker, zero_ns), *_torch_events(worker, folder, zero_ns)):
            file.write(f"{comma}{json.dumps(event)}")
            comma = ",\n"
    file.write("\n]}\n")


def _own_events(worker: dict[str, Any], zero_ns: int) -> Iterator[dict[str, Any]]:
    """Yields the name of a rank's process, and its rows with the steps and their parts."""
    rank = int(worker["rank"])
    yield _named("process_name", rank, 0, {"name": f"rank {rank} ({worker['host']})"})
    yield _named("process_sort_index", rank, 0, {"sort_index": rank})
    for row, name in ((_STEPS_ROW, "steps"), (_PARTS_ROW, "parts of the steps")):
        yield _named("thread_name", rank, row, {"name": name})
        yield _named("thread_sort_index", rank, row, {"sort_index": row - 2 * _DEVICE_ROWS})
    for step in worker["steps"]:
        yield _span(f"step {step['step']}", rank, _STEPS_ROW, step["begin_ns"] - zero_ns, step["end_ns"] - zero_ns)
    for part, begin_ns, end_ns in worker["spans"]:
        yield _span(part, rank, _PARTS_ROW, begin_ns - zero_ns, end_ns - zero_ns)


def _torch_events(worker: dict[str, Any], folder: Path, zero_ns: int) -> Iterator[dict[str, Any]]:
    """Yields the events that torch has recorded, moved into the rank's process and to the common clock."""
    path = _trace_of(folder, worker)
    if not path.exists():
        return
    trace = _read(path)
    shift_us = (int(trace.get("baseTimeNanoseconds", 0)) - zero_ns) / _NS_PER_US
    rank = int(worker["rank"])
    rows: dict[tuple[Any, Any], int] = {}
    for event in trace["traceEvents"]:
        if not isinstance(event.get("pid"), int) or event["name"].startswith("process_"):
            # These rows describe torch's profiler itself.
            continue
        event["tid"] = _row(event, rows, int(worker["pid"]))
        event["pid"] = rank
        if "ts" in event:
            event["ts"] += shift_us
        if "id" in event:
            # An id joins the ends of an arrow between events of one rank, so ranks must not share ids.
            event["id"] = f"{rank}.{event['id']}"
        yield event


def _row(event: dict[str, Any], rows: dict[tuple[Any, Any], int], pid: int) -> int:
    """Returns the row of ``event`` in the process of its rank: a thread, or a stream of a device."""
    # Rows of other process ids are devices.
    if isinstance(event["tid"], int) and event["pid"] == pid:
        return int(event["tid"])
    return rows.setdefault((event["pid"], event["tid"]), _DEVICE_ROWS + len(rows))


def _named(name: str, rank: int, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": row, "args": args}


def _span(name: str, rank: int, row: int, begin_ns: int, end_ns: int) -> dict[str, Any]:
    ts, dur = begin_ns / _NS_PER_US, (end_ns - begin_ns) / _NS_PER_US
    return {"ph": "X", "cat": "fleet", "name": name, "pid": rank, "tid": row, "ts": ts, "dur": dur}


def table_lines(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each rank: milliseconds of a step, and of its parts, as means over the steps."""
    numbers = sorted({int(step["step"]) for worker in workers for step in worker["steps"]})
    head = "".join(f"{name:>10}" for name in ("rank", "step", *PARTS))
    lines = [f"Where steps {numbers[0]} to {numbers[-1]} went, in ms (mean of a step):", head]
    for worker in workers:
        parts = _means_ms(worker)
        cells = "".join(f"{value:>10.2f}" for value in (sum(parts.values()), *parts.values()))
        lines.append(f"{worker['rank']:>10}{cells}")
    return lines


def straggler_lines(workers: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each rank whose own part of a step, all but the exchange, is far above the median."""
    means = {int(worker["rank"]): _means_ms(worker) for worker in workers}
    own = {rank: sum(parts.values()) - parts["exchange"] for rank, parts in means.items()}
    usual = median_low(own.values())
    lines = []
    for rank, spent in own.items():
        if spent > _SLOW * usual:
            usual_parts = {part: median_low(parts[part] for parts in means.values()) for part in PARTS}
            more = {part: means[rank][part] - usual_parts[part] for part in PARTS if part != "exchange"}
            part = max(more, key=lambda name: more[name])
            lines.append(
                f"Straggler: rank {rank} needs {spent:.2f} ms for a step without the exchange, {spent / usual:.1f} "
                f"times the median of {usual:.2f} ms; most of that in {part}, {means[rank][part]:.2f} against "
                f"{usual_parts[part]:.2f} ms."
            )
    return lines


def _means_ms(worker: dict[str, Any]) -> dict[str, float]:
    return {part: mean(step["parts_ns"][part] for step in worker["steps"]) / _NS_PER_MS for part in PARTS}


def _trace_of(folder: Path, worker: dict[str, Any]) -> Path:
    return folder / f"rank{worker['rank']}.trace.json"
