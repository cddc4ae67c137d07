"""The page as HTML: parts by their id, so that only the changed ones are sent again.

Everything that a user's program, command line or log may hold is escaped here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from fleet.launch.page.job_charts import is_loss, job_charts
from fleet.launch.page.job_view import BAD, GOOD, IDLE, JobView, ProcessRow
from fleet.launch.page.page_folder import ServerRecord
from fleet.launch.page.shown_values import about, clock, counted, duration, number, rate, shown, size
from fleet.launch.processes.logs import read_tail

Parts = dict[str, str]

_LOG_BYTES = 32_768
_JOB_LOG_BYTES = 8_000  # on the page of the job, where it is sent again with each line
_LAUNCHER_BYTES = 6_000
_MOST_NAMED = 3
_COLUMNS = ("Process", "State", "Step", "Steps/s", "Loss", "Memory", "Node", "PID")
_NUMBERS = ("Step", "Steps/s", "Loss", "Memory", "PID")
_SPARE = ("Node", "PID")  # a phone does without
_RATES = (
    ("pulled_rows_per_s", "rows/s pulled"),
    ("pushed_rows_per_s", "rows/s pushed"),
    ("pulled_elements_per_s", "dense elements/s pulled"),
    ("pushed_elements_per_s", "dense elements/s pushed"),
)
_LAGS = (("publish_lag_seconds", "behind the sink"), ("stream_age_seconds", "since the stream moved"))


def job_parts(view: JobView, base: str = "") -> Parts:
    """Returns the parts of the page of the job. ``processes`` holds the rows; each row is a part as well.

    Args:
        view: the job to show.
        base: stands before every path of the page.
    """
    rows = view.rows()
    parts = {
        "summary": _summary(view, rows, base),
        "restarts": _restarts(view),
        "curves": _guarded("curves", "Curves", lambda: _curves(view, rows)),
        "processes": _processes(rows, base),
        "servers": _guarded("servers", "Parameter servers of this node", lambda: _servers(view.servers())),
        "worker_log": _worker_log(rows, base),
        "checkpoints": _guarded("checkpoints", "Checkpoints", lambda: _checkpoints(view)),
        "launcher": _launcher(view),
    }
    return {**parts, **{f"row-{row.key}": _row(row, base) for row in rows}}


def process_parts(view: JobView, key: str, stacks: str = "", base: str = "") -> Parts | None:
    """Returns the parts of the page of one process; None when there is no such process."""
    row = next((row for row in view.rows() if row.key == key), None)
    if row is None:
        return None
    values = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{number(value)}</td></tr>'
        for name, value in sorted(row.values.items())
    )
    name = escape(row.key, quote=True)
    button = f'<form method="post" action="{base}/process/{name}/stacks"><button>Show the stacks now</button></form>'
    answer = f"<pre>{shown(stacks)}</pre>" if stacks else ""
    head = (
        f'<p><a href="{base}/">Job {escape(view.facts.job_id)}</a></p><h1>{escape(row.name)}</h1>'
        f'<p class="state {row.tone}">{escape(row.state)}</p><p class="quiet">process {row.pid} on {escape(row.host)}'
        f"{'' if row.step is None else f', step {row.step:,}'}</p>"
    )
    return {
        "summary": f'<section id="summary">{head}</section>',
        # The stacks that were asked for stand where they are seen at once.
        **({"stacks": _section("stacks", "Python stacks", button + answer)} if stacks else {}),
        "log": _section("log", f"Log: {row.log_path}", _tail(row.log_path, _LOG_BYTES)),
        **({} if stacks else {"stacks": _section("stacks", "Python stacks", button)}),
        "values": _section("values", "Values", f"<table><tbody>{values}</tbody></table>" * bool(values)),
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


def _summary(view: JobView, rows: Sequence[ProcessRow], base: str) -> str:
    facts = view.facts
    tone = BAD if view.state == "failed" else GOOD if view.state == "running" else IDLE
    tiles = _progress(view, rows)
    total = max((one.total_steps for row in rows if (one := row.progress)), default=0.0)
    bar = ""
    if total:
        done = min(one.step for row in rows if (one := row.progress))
        bar = f'<progress max="{total:.0f}" value="{done:.0f}" aria-label="steps made"></progress>'
    body = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in tiles.items())
    return (
        f'<section id="summary"><h1>Job {escape(facts.job_id)} <span class="state {tone}">{escape(view.state)}</span>'
        f"</h1><p><code>{escape(facts.command)}</code></p>"
        f'<dl class="tiles">{body}</dl>{bar}{_trouble(rows, base)}'
        f'<p class="quiet">{escape(view.where)}, mode {escape(facts.mode)}, since {clock(view.began_at)}</p></section>'
    )


def _progress(view: JobView, rows: Sequence[ProcessRow]) -> dict[str, str]:
    """Returns the numbers of the summary by their names."""
    workers = [row for row in rows if row.name.startswith("worker")]
    tones = Counter(row.tone for row in workers)
    words = ((GOOD, "running"), (BAD, "in trouble"), (IDLE, "not running"))
    counts = ", ".join(f"{tones[tone]} {word}" for tone, word in words if tones[tone])
    tiles = {f"Worker{'s' * (len(workers) != 1)}": f"{len(workers)}<small>{counts or 'none yet'}</small>"}
    known = [one for row in workers if (one := row.progress)]
    steps = [row.step for row in workers if row.step is not None]
    if steps:
        notes = [f"of {max(one.total_steps for one in known):,.0f}"] if known else []
        if min(steps) < max(steps):
            last = min((row for row in workers if row.step is not None), key=lambda row: row.step or 0)
            notes.append(f"{escape(last.name)} is at {min(steps):,}")
        tiles["Step"] = f"{max(steps):,}<small>{', '.join(notes)}</small>"
        rates = [row.rate for row in workers if row.rate is not None]
        tiles |= {"Steps/s": f"{rate(min(rates))}<small></small>"} if rates else {}
    tiles["Elapsed"] = f"{duration(view.elapsed_s)}<small></small>"
    if steps and view.state == "running":
        left = [max(one.left_s - (time.time() - one.at), 0.0) for one in known if one.left_s is not None]
        hint = "" if known else "<small>fleet.log(..., total_steps=N) tells</small>"
        tiles["Left"] = f"{about(max(left))}<small></small>" if left else f"not known yet{hint}"
        tiles["Left"] = tiles["Left"] if known else f"not known{hint}"
    return tiles


def _trouble(rows: Sequence[ProcessRow], base: str) -> str:
    """Returns a line that names the first processes in trouble."""
    bad = [row for row in rows if row.tone == BAD]
    named = ", ".join(f"{_link(row, base)}: {escape(row.state)}" for row in bad[:_MOST_NAMED])
    more = f", and {len(bad) - _MOST_NAMED:,} more" if len(bad) > _MOST_NAMED else ""
    return f'<p class="state bad">{named}{more}</p>' if bad else ""


def _link(row: ProcessRow, base: str) -> str:
    return f'<a href="{base}/process/{escape(row.key, quote=True)}">{escape(row.name)}</a>'


def _processes(rows: Sequence[ProcessRow], base: str) -> str:
    heads = "".join(f"<th{_classes(name)}>{name}</th>" for name in _COLUMNS)
    body = "".join(_row(row, base) for row in rows)
    table = f'<table class="rows"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    return _section("processes", "Processes of this node", table if rows else '<p class="quiet">none yet</p>')


def _row(row: ProcessRow, base: str) -> str:
    cells = {
        "Process": _link(row, base),
        "State": f'<span class="state {row.tone}">{escape(row.state)}</span>',
        "Step": "" if row.step is None else f"{row.step:,}",
        "Steps/s": "" if row.rate is None else rate(row.rate),
        "Loss": "" if row.loss is None else number(row.loss),
        "Memory": "" if row.memory_mib is None else f"{row.memory_mib:,.0f} MiB",
        "Node": escape(row.host),
        "PID": f"{row.pid}",
    }
    body = "".join(f"<td{_classes(name)}>{cells[name]}</td>" for name in _COLUMNS)
    return f'<tr id="row-{escape(row.key, quote=True)}">{body}</tr>'


def _curves(view: JobView, rows: Sequence[ProcessRow]) -> str:
    curves = view.curves()
    hint = ""
    if any(row.step for row in rows) and not any(map(is_loss, curves)):
        hint = '<p class="quiet">No loss yet: <code>fleet.log({"loss": loss})</code> in the loop draws its curve.</p>'
    drawn = f'<div class="curves">{"".join(job_charts(curves))}</div>' if curves else ""
    return _section("curves", "Curves", hint + drawn)


def _servers(servers: Mapping[int, Sequence[ServerRecord]]) -> str:
    body = []
    columns = ["Holds", "Memory"]
    all_tables = [found for records in servers.values() for one in records for found in one.tables.values()]
    if any(found.get("evicted_rows") for found in all_tables):
        columns.append("Evicted")
    for index, records in servers.items():
        totals: Counter[str] = Counter()
        for record in records:
            totals.update(record.totals)
        tables = [pair for record in records for pair in record.tables.items()]
        body += [_table_row(index, table, found, columns) for table, found in tables]
        notes = [f"process {size(totals['memory_bytes'] / len(records))}", counted(totals["changes"], "change")]
        notes += [f"{totals[name]:,.0f} {meaning}" for name, meaning in _RATES if totals[name]]
        notes += [f"{totals[name]:.1f} s {meaning}" for name, meaning in _LAGS if name in totals]
        said = f'<td class="quiet" colspan="{len(columns) + 1}">{", ".join(notes)}</td>'
        body.append(f'<tr class="notes"><td>server {index}</td>{said}</tr>')
    heads = "<th>Server</th><th>Table</th>"
    heads += "".join(f'<th class="number">{name}</th>' for name in columns)
    table = f'<table class="rows"><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return _section("servers", "Parameter servers of this node", table if body else "")


def _table_row(index: int, table: str, found: Mapping[str, float], columns: Sequence[str]) -> str:
    """Returns the row of a table of ids, which holds rows, or of a dense one, which holds elements."""
    is_dense = "table_elements" in found
    holds = counted(found["table_elements"], "element") if is_dense else counted(found.get("table_rows", 0), "row")
    evicted = counted(found["evicted_rows"], "row") if found.get("evicted_rows") else ""
    texts = {"Holds": holds, "Memory": size(found.get("table_bytes", 0)), "Evicted": evicted}
    cells = "".join(f'<td class="number" data-label="{name}">{texts[name]}</td>' for name in columns)
    return f"<tr><td>server {index}</td><td>{escape(table)}</td>{cells}</tr>"


def _worker_log(rows: Sequence[ProcessRow], base: str) -> str:
    """Returns the log of the first worker that is in trouble, or of the first one."""
    workers = [row for row in rows if row.name.startswith("worker")]
    if not workers:
        return _section("worker_log", "", "")
    row = next((row for row in workers if row.tone == BAD), workers[0])
    where = f'<small class="quiet">{escape(str(row.log_path))}</small>'
    tail = _tail(row.log_path, _JOB_LOG_BYTES)
    return f'<section id="worker_log"><h2>Log of {_link(row, base)} {where}</h2>{tail}</section>'


def _launcher(view: JobView) -> str:
    """Returns the launcher's own log, closed: it begins with the settings of the job, and says little while it runs."""
    text = _tail(view.facts.launcher_log, _LAUNCHER_BYTES)
    return (
        f'<section id="launcher"><details id="launcher-log"><summary>Log of the launcher</summary>{text}</details>'
        "</section>"
    )


def _checkpoints(view: JobView) -> str:
    found = view.checkpoints()
    rows = "".join(
        f'<tr><td><code>{escape(str(one.path))}</code></td><td class="number">{size(one.num_bytes)}</td>'
        f"<td>{clock(one.saved_at)}</td></tr>"
        for one in found
    )
    return _section("checkpoints", "Checkpoints", f'<table class="rows"><tbody>{rows}</tbody></table>' * bool(rows))


def _restarts(view: JobView) -> str:
    failures = view.failures()
    reports = "".join(
        f'<details id="failure-{len(failures) - i}"><summary>{clock(one.at)}: {escape(one.what)}</summary>'
        f"<pre>{shown(one.report)}</pre></details>"
        for i, one in enumerate(failures)
    )
    return _section("restarts", f"Failures: {len(failures)}", reports)


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


def _tail(path: Path, limit_bytes: int) -> str:
    """Returns the end of a log, from the first whole line on."""
    text = read_tail(path, limit_bytes=limit_bytes)
    if len(text.encode("utf-8", "replace")) >= limit_bytes and "\n" in text:
        text = text.partition("\n")[2]
    return f'<pre class="tail">{shown(text)}</pre>' if text else '<p class="quiet">empty</p>'


def _classes(column: str) -> str:
    """Returns the attributes of a cell; a phone shows a row as lines, with the name of the column before the value."""
    names = [name for name, has in (("number", column in _NUMBERS), ("spare", column in _SPARE)) if has]
    label = f' data-label="{column}"' if column in _NUMBERS else ""
    return (f' class="{" ".join(names)}"' if names else "") + label
