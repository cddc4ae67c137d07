"""The page as HTML: parts by their id, so that only the changed ones are sent again.

Everything that a user's program, command line or log may hold is escaped here.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape

from fleet.launch.page.job_view import BAD, GOOD, IDLE, JobView, ProcessRow
from fleet.launch.page.page_folder import ServerRecord
from fleet.launch.processes.logs import read_tail

Parts = dict[str, str]

_LOG_BYTES = 32_768
_LAUNCHER_BYTES = 6_000
_POINTS = 240
_WIDTH, _HEIGHT = 240, 90
_LAST_SECOND = 253_370_764_799  # of the year 9998
# Escape sequences that colour a terminal, and characters that no browser shows.
_UNSHOWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_COLUMNS = ("Process", "State", "Step", "Steps/s", "Loss", "Memory", "Node", "PID")
_NUMBERS = ("Step", "Steps/s", "Loss", "Memory", "PID")
_SPARE = ("Node", "PID")  # a phone does without
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
# The columns of the table of servers, by the measures of a table.
_TABLE_COLUMNS = (("Rows", "table_rows"), ("Memory", "table_bytes"), ("Evicted rows", "evicted_rows"))
_RATES = (("pulled_rows_per_s", "rows/s pulled"), ("pushed_rows_per_s", "rows/s pushed"))
_LAGS = (("publish_lag_seconds", "behind the sink"), ("stream_age_seconds", "since the stream moved"))


def job_parts(view: JobView, base: str = "") -> Parts:
    """Returns the parts of the page of the job. ``processes`` holds the rows; each row is a part as well.

    Args:
        view: the job to show.
        base: stands before every path of the page.
    """
    rows = view.rows()
    parts = {
        "summary": _summary(view, rows),
        "processes": _processes(rows, base),
        "curves": _guarded("curves", "Curves", lambda: _curves(view.curves())),
        "servers": _guarded("servers", "Parameter servers of this node", lambda: _servers(view.servers())),
        "checkpoints": _guarded("checkpoints", "Checkpoints", lambda: _checkpoints(view)),
        "restarts": _restarts(view),
        "launcher": _section(
            "launcher", "Launcher", _tail(read_tail(view.facts.launcher_log, limit_bytes=_LAUNCHER_BYTES))
        ),
    }
    return {**parts, **{f"row-{row.key}": _row(row, base) for row in rows}}


def process_parts(view: JobView, key: str, stacks: str = "", base: str = "") -> Parts | None:
    """Returns the parts of the page of one process; None when there is no such process."""
    row = next((row for row in view.rows() if row.key == key), None)
    if row is None:
        return None
    values = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{_number(value)}</td></tr>'
        for name, value in sorted(row.values.items())
    )
    name = escape(row.key, quote=True)
    button = f'<form method="post" action="{base}/process/{name}/stacks"><button>Show the stacks now</button></form>'
    shown = f"<pre>{_shown(stacks)}</pre>" if stacks else ""
    head = (
        f'<p><a href="{base}/">Job {escape(view.facts.job_id)}</a></p><h1>{escape(row.name)}</h1>'
        f'<p class="state {row.tone}">{escape(row.state)}</p><p class="quiet">process {row.pid} on {escape(row.host)}'
        f"{'' if row.step is None else f', step {row.step}'}</p>"
    )
    return {
        "summary": f'<section id="summary">{head}</section>',
        "stacks": _section("stacks", "Python stacks", button + shown),
        "values": _section(
            "values", "Values", f'<div class="wide"><table><tbody>{values}</tbody></table></div>' * bool(values)
        ),
        "log": _section("log", f"Log: {row.log_path}", _tail(read_tail(row.log_path, limit_bytes=_LOG_BYTES))),
    }


def document(title: str, parts: Parts, events: str, base: str = "") -> str:
    """Returns a whole page. ``events`` is the path of its changes; rows stand inside another part already."""
    body = "".join(html for part, html in parts.items() if not part.startswith("row-"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="stylesheet" href="{base}/page.css">'
        f'<script src="{base}/page.js" defer></script></head>'
        f'<body data-events="{base}{escape(events, quote=True)}"><main>'
        '<p id="lost" role="alert">No connection to the launcher: the job has ended, or the tunnel is closed. What '
        f"stands below is the last that came.</p>{body}</main></body></html>"
    )


def changed(before: Parts, now: Parts) -> Parts:
    """Returns the parts of ``now`` that ``before`` does not have; rows only where the same rows stood there."""
    rows_before, rows = ([part for part in parts if part.startswith("row-")] for parts in (before, now))
    same_rows = rows_before == rows
    return {
        part: html
        for part, html in now.items()
        if before.get(part) != html and (same_rows if part.startswith("row-") else part != "processes" or not same_rows)
    }


def _summary(view: JobView, rows: Sequence[ProcessRow]) -> str:
    facts = view.facts
    workers = [row for row in rows if row.name.startswith("worker")]
    tones = Counter(row.tone for row in workers)
    words = ((GOOD, "running"), (BAD, "in trouble"), (IDLE, "not running"))
    counts = ", ".join(f"{tones[tone]} {word}" for tone, word in words if tones[tone])
    steps = [row.step for row in workers if row.step is not None]
    ahead = ""
    if steps:
        ahead = f"Step {max(steps)}"
        if min(steps) < max(steps):
            last = min((row for row in workers if row.step is not None), key=lambda row: row.step or 0)
            ahead += f"; furthest behind: {escape(last.name)} at {min(steps)}"
    tone = BAD if view.state == "failed" else GOOD if view.state == "running" else IDLE
    return (
        f'<section id="summary"><h1>Job {escape(facts.job_id)}</h1><p class="state {tone}">{escape(view.state)}</p>'
        f"<p>{len(workers)} worker{'s' * (len(workers) != 1)}: {counts or 'none yet'}. {ahead}</p>"
        f'<p class="quiet">{escape(view.where)}, mode {escape(facts.mode)}, since {_clock(view.began_at)}</p>'
        f"<p><code>{escape(facts.command)}</code></p></section>"
    )


def _processes(rows: Sequence[ProcessRow], base: str) -> str:
    heads = "".join(f"<th{_classes(name)}>{name}</th>" for name in _COLUMNS)
    body = "".join(_row(row, base) for row in rows)
    table = f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    return _section("processes", "Processes of this node", table if rows else '<p class="quiet">none yet</p>')


def _row(row: ProcessRow, base: str) -> str:
    cells = {
        "Process": f'<a href="{base}/process/{escape(row.key, quote=True)}">{escape(row.name)}</a>',
        "State": f'<span class="state {row.tone}">{escape(row.state)}</span>',
        "Step": "" if row.step is None else f"{row.step}",
        "Steps/s": "" if row.rate is None else f"{row.rate:.3g}",
        "Loss": "" if row.loss is None else _number(row.loss),
        "Memory": "" if row.memory_mib is None else f"{row.memory_mib:.0f} MiB",
        "Node": escape(row.host),
        "PID": f"{row.pid}",
    }
    body = "".join(f"<td{_classes(name)}>{cells[name]}</td>" for name in _COLUMNS)
    return f'<tr id="row-{escape(row.key, quote=True)}">{body}</tr>'


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    drawn = [
        _curve(name, points) for name, points in sorted(curves.items(), key=lambda item: ("/" in item[0], item[0]))
    ]
    return _section("curves", "Curves", f'<div class="curves">{"".join(drawn)}</div>' if drawn else "")


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Returns one curve; values that are not finite are left out of the line."""
    last = points[-1]
    shown = [point for point in points if math.isfinite(point[1])]
    if len(shown) > _POINTS:
        apart = (len(shown) - 1) / (_POINTS - 1)
        shown = [shown[round(i * apart)] for i in range(_POINTS)]
    line = scale = ""
    if shown:
        low, high = min(value for _, value in shown), max(value for _, value in shown)
        first = shown[0][0]
        span = max(shown[-1][0] - shown[0][0], 1)
        # In halves, because the difference of two large floats may overflow to infinity.
        height = (high / 2 - low / 2) or 1.0
        line = " ".join(
            f"{(step - first) / span * _WIDTH:.1f},{(high / 2 - value / 2) / height * (_HEIGHT - 8) + 4:.1f}"
            for step, value in shown
        )
        scale = f"steps {first} to {shown[-1][0]}, {_number(low)} to {_number(high)}"
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
    return (
        f'<figure><figcaption><span>{escape(name)}</span><b class="number">{_number(last[1])}</b></figcaption>'
        f'<svg {box} role="img" aria-label="{escape(name, quote=True)}: {scale}">'
        f'<line x1="0" y1="{_HEIGHT - 1}" x2="{_WIDTH}" y2="{_HEIGHT - 1}"/><polyline points="{line}"/></svg>'
        f'<span class="quiet number">{scale}</span></figure>'
    )


def _servers(servers: Mapping[int, Sequence[ServerRecord]]) -> str:
    body = []
    for index, records in servers.items():
        totals: Counter[str] = Counter()
        for record in records:
            totals.update(record.totals)
        body += [_table_row(index, table, found) for record in records for table, found in record.tables.items()]
        notes = [f"{totals['memory_bytes'] / len(records) / (1 << 20):.0f} MiB", f"{totals['changes']:.0f} changes"]
        notes += [f"{totals[name]:.0f} {meaning}" for name, meaning in _RATES if name in totals]
        notes += [f"{totals[name]:.1f} s {meaning}" for name, meaning in _LAGS if name in totals]
        body.append(f'<tr><td>server {index}</td><td class="quiet" colspan="4">{", ".join(notes)}</td></tr>')
    heads = "".join(f"<th>{name}</th>" for name in ("Server", "Table"))
    heads += "".join(f'<th class="number">{name}</th>' for name, _ in _TABLE_COLUMNS)
    table = f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    return _section("servers", "Parameter servers of this node", table if body else "")


def _table_row(index: int, table: str, found: Mapping[str, float]) -> str:
    texts = {"table_rows": f"{found.get('table_rows', 0):.0f}", "table_bytes": _size(found.get("table_bytes", 0))}
    texts["evicted_rows"] = f"{found['evicted_rows']:.0f}" if "evicted_rows" in found else ""
    cells = "".join(f'<td class="number">{texts[name]}</td>' for _, name in _TABLE_COLUMNS)
    return f"<tr><td>server {index}</td><td>{escape(table)}</td>{cells}</tr>"


def _checkpoints(view: JobView) -> str:
    found = view.checkpoints()
    rows = "".join(
        f'<tr><td><code>{escape(str(one.path))}</code></td><td class="number">{_size(one.num_bytes)}</td>'
        f"<td>{_clock(one.saved_at)}</td></tr>"
        for one in found
    )
    return _section(
        "checkpoints", "Checkpoints", f'<div class="wide"><table><tbody>{rows}</tbody></table></div>' * bool(rows)
    )


def _restarts(view: JobView) -> str:
    failures = view.failures()
    shown = "".join(
        f'<details id="failure-{len(failures) - i}"><summary>{_clock(one.at)}: {escape(one.what)}</summary>'
        f"<pre>{_shown(one.report)}</pre></details>"
        for i, one in enumerate(failures)
    )
    return _section("restarts", f"Failures: {len(failures)}", shown)


def _guarded(part: str, title: str, make: Callable[[], str]) -> str:
    """Returns the section that ``make`` returns; a section with the error where it raises, so that the others stand."""
    try:
        return make()
    except Exception as error:
        # The processes may have written anything, and a file system may answer anything: one section fails, not the
        # page.
        return _section(part, title, f'<p class="quiet">cannot be shown now: {escape(f"{error}")}</p>')


def _section(part: str, title: str, body: str) -> str:
    """Returns a section; one without a body is there and takes no room."""
    return (
        f'<section id="{part}"><h2>{escape(title)}</h2>{body}</section>' if body else f'<section id="{part}"></section>'
    )


def _tail(text: str) -> str:
    return f'<pre class="tail">{_shown(text)}</pre>' if text else '<p class="quiet">empty</p>'


def _shown(text: str) -> str:
    return escape(_UNSHOWN.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def _classes(column: str) -> str:
    names = [name for name, has in (("number", column in _NUMBERS), ("spare", column in _SPARE)) if has]
    return f' class="{" ".join(names)}"' if names else ""


def _number(value: float) -> str:
    return f"{value:.5g}"


def _size(num_bytes: float) -> str:
    unit, size = next((pair for pair in _UNITS if num_bytes >= pair[1]), ("B", 1))
    return f"{num_bytes / size:.3g} {unit}"


def _clock(seconds: float) -> str:
    # A file may bear any time, also one that localtime() refuses.
    seconds = min(max(seconds, 0.0), _LAST_SECOND)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
