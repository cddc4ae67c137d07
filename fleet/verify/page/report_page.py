"""The report of ``python -m fleet verify`` as one HTML page: no resources from elsewhere and no script."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from fleet.common.plain_files import replace_file
from fleet.verify.page.line_chart import Series, line_chart
from fleet.verify.page.pair_chart import TwoNorms, pair_chart
from fleet.verify.user_lines import place_of

if TYPE_CHECKING:
    from fleet.verify.report import Report

_OUTCOMES = {
    "equal": "Equal",
    "differs": "Differs",
    "not_comparable": "Could not be compared",
}
_FIRST_FACTS = ("where", "step", "rank", "module", "tensor", "expected", "received", "difference", "cause")
_HEADINGS = {"rank": "worker", "where": "line", "loss_one": "loss, one process", "loss_many": "loss, workers"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --page: #f6f7f9; --card: #fff; --rule: #dfe3e8;
  --good: #14783c; --bad: #b3261e; --odd: #8a5a00; --c0: #1f6fd1; --c1: #d9650b; --c2: #1d8a5f; --c3: #9a3fb5;
  --c4: #b58900; --c5: #c2255c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9ef; --soft: #9aa6b5; --page: #14181e; --card: #1c222b;
  --rule: #333c48; --good: #5ad08a; --bad: #ff8a80; --odd: #f0b95a; --c0: #6cb0ff; --c1: #ff9d57; --c2: #58d3a2;
  --c3: #d59bea; --c4: #e3c55c; --c5: #ff86ad; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 20px 16px 40px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 16px; padding: 14px 16px; background: var(--card);
  border: 1px solid var(--rule); border-left: 6px solid var(--tone); border-radius: 6px; }
h1 b { color: var(--tone); }
h2 { font-size: 16px; margin: 28px 0 8px; }
.equal { --tone: var(--good); } .differs { --tone: var(--bad); } .not_comparable { --tone: var(--odd); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 12px 16px; }
.sentence { font-size: 17px; margin: 0 0 10px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 16px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code, dd, td { font-variant-numeric: tabular-nums; }
code { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px; border-bottom: 1px solid var(--rule); }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.wide { min-width: 260px; } td.word { white-space: nowrap; }
td.name { min-width: 110px; overflow-wrap: anywhere; }
td.text { overflow-wrap: anywhere; } td p { margin: 2px 0 0; color: var(--soft); font-size: 13px; }
.about { color: var(--soft); margin: -6px 0 8px; overflow-wrap: anywhere; } .picture { margin-top: 12px; }
.bar0 { fill: var(--c0); } .bar1 { fill: var(--c1); } svg text.marked { fill: var(--bad); font-weight: 600; }
ul { margin: 0; padding-left: 20px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 12px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
figcaption { margin-top: 6px; }
.grid { stroke: var(--rule); } polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); }
.legend li::before { content: ""; display: inline-block; width: 18px; margin-right: 6px; vertical-align: middle;
  border-top: 3px solid var(--own); }
.line1 { stroke-dasharray: 6 4; } .legend .key1::before { border-top-style: dashed; }
@media (max-width: 600px) { th, td { padding: 5px 8px; } td.wide { min-width: 200px; } svg text { font-size: 15px; } }
"""
_COLOURS = "".join(
    f".line{i} {{ stroke: var(--c{i}); }} .dot{i} {{ fill: var(--c{i}); }} .key{i} {{ --own: var(--c{i}); }}\n"
    for i in range(6)
)


def write_page(report: Report, path: Path) -> None:
    """Writes the page of ``report`` to ``path``: one file that any browser shows, also without a network.

    The first line is the outcome; then come the first difference with its cause and place, all findings, the losses
    of both runs and the largest differences over the steps, the options with their tolerances, notes and timings.
    Everything that comes from the script is escaped.

    Raises:
        OSError: ``path`` cannot be written.
    """
    replace_file(path, page_text(report.to_json()))


def page_text(data: Mapping[str, Any]) -> str:
    """Returns the page of a report that ``Report.to_json`` wrote."""
    outcome = str(data["outcome"])
    title = f"fleet verify: {_OUTCOMES.get(outcome, outcome)}"
    body = "".join(
        (
            _outcome_line(data, outcome),
            _first_difference(data.get("findings") or [], data.get("first") or [], outcome),
            _findings("All findings", 2, data.get("findings") or []),
            _findings("Warnings", 1, data.get("warnings") or []),
            _charts(data.get("per_step") or []),
            _section("Options", _table(_rows_of(data.get("options"), "option"))),
            _section("Steps", _table(data.get("per_step") or [])),
            _section("Notes", _list(data.get("notes") or [])),
            _section("Time", _facts(_timings(data.get("timings") or {}))),
        )
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_COLOURS}</style></head>\n"
        f'<body class="{escape(outcome)}">\n{body}</body></html>\n'
    )


def _outcome_line(data: Mapping[str, Any], outcome: str) -> str:
    workers = data.get("workers")
    steps = data.get("steps")
    run = f"{workers} workers against 1 process, {steps} step{'' if steps == 1 else 's'}"
    number = len(data.get("findings") or [])
    found = f", {number} finding{'' if number == 1 else 's'}" if number else ""
    limit = data.get("tolerance")
    within = ""
    if isinstance(limit, Mapping) and limit.get("text"):
        within = f"<p>Compared within {escape(str(limit['text']))}: relative {_value(limit.get('relative'))}.</p>\n"
    return f"<h1><b>{escape(_OUTCOMES.get(outcome, outcome))}</b>: {escape(run + found)}</h1>\n{_about(data)}{within}"


def _about(data: Mapping[str, Any]) -> str:
    """Returns the command, the date and the versions, without which a page that is sent says little."""
    about = data.get("about") or {}
    if not about:
        return ""
    versions = ", ".join(f"{name} {about[name]}" for name in ("fleet", "torch", "python") if about.get(name))
    parts = [
        f"<code>{escape(str(about.get('command', '')))}</code>",
        escape(str(about.get("date", ""))),
        escape(versions),
    ]
    return f'<p class="about">{" &middot; ".join(part for part in parts if part)}</p>\n'


def _first_difference(findings: Sequence[Mapping[str, Any]], tensors: Sequence[Mapping[str, Any]], outcome: str) -> str:
    title = "Why" if outcome == "not_comparable" else "First difference"
    if not findings:
        return ""
    first = findings[0]
    values = {**first, "where": place_of(str(first.get("where") or ""))}
    facts = [(_HEADINGS.get(name, name), values[name]) for name in _FIRST_FACTS if _is_given(values.get(name))]
    made = _section(title, f'<p class="sentence">{escape(str(first.get("sentence", "")))}</p>{_facts(facts)}')
    pairs = [TwoNorms(str(one["tensor"]), one.get("expected"), one.get("received")) for one in tensors]
    label = f"Norms of the gradients at update {first.get('step')}"
    chart = pair_chart(pairs, names=("one process", "workers"), label=label, marked=str(first.get("tensor", "")))
    return made + (f'<div class="charts picture">{chart}</div>\n' if chart else "")


def _findings(title: str, least: int, findings: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of ``findings``, if there are at least as many."""
    if len(findings) < least:
        return ""
    lines = []
    for one in findings:
        facts = [one.get("cause"), one.get("tensor") or one.get("module"), one.get("where")]
        below = " &middot; ".join(_value(fact) for fact in facts if _is_given(fact))
        lines.append(
            f'<tr><td class="number">{_value(one.get("step"))}</td><td class="number">{_value(one.get("rank"))}</td>'
            f'<td class="text">{_value(one.get("sentence"))}<p>{below}</p></td></tr>'
        )
    head = '<th class="number">step</th><th class="number">worker</th><th>what is wrong</th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return _section(title, table)


def _charts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the losses of both runs, and the largest differences on a logarithmic scale."""
    names = [name for name in _columns(rows) if name != "step" and any(_is_number(row.get(name)) for row in rows)]
    steps = [float(row.get("step", i)) for i, row in enumerate(rows)]

    def series(name: str) -> Series:
        values: list[object] = [row.get(name) for row in rows]
        points = [(step, float(v) if _is_number(v) else None) for step, v in zip(steps, values, strict=True)]
        return Series(_words(name), points)

    losses = [series(name) for name in names if "loss" in name and "difference" not in name]
    others = [series(name) for name in names if "loss" not in name or "difference" in name]
    charts = line_chart(losses[:6], label="Loss")
    if any(sum(value is not None for _, value in one.points) > 1 for one in others):
        charts += line_chart(others[:6], label="Largest differences (logarithmic)", log=True)
    return f'<h2>Over the steps</h2>\n<div class="charts">{charts}</div>\n' if charts else ""


def _section(title: str, content: str) -> str:
    if not content:
        return ""
    style = "card scroll" if content.startswith("<table") else "card"
    return f'<h2>{escape(title)}</h2>\n<div class="{style}">{content}</div>\n'


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a column for each key of ``rows``; columns of numbers are aligned on the right."""
    if not rows:
        return ""
    columns = _columns(rows)
    kinds = {name: _kind(name, [row.get(name) for row in rows]) for name in columns}
    head = "".join(f'<th class="{kinds[name]}">{escape(_words(name))}</th>' for name in columns)
    lines = "".join(
        "<tr>" + "".join(f'<td class="{kinds[name]}">{_value(row.get(name))}</td>' for name in columns) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _kind(name: str, values: Sequence[object]) -> str:
    if all(v is None or _is_number(v) for v in values):
        return "number"
    if name in ("cause", "name", "option", "value", "tolerance"):
        return "word"
    return "name" if name in ("module", "tensor", "where") else "wide"


def _rows_of(options: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns a mapping, a list of texts or a list of mappings as rows of a table."""
    if isinstance(options, Mapping):
        return [
            {name: key, **value} if isinstance(value, Mapping) else {name: key, "value": value}
            for key, value in options.items()
        ]
    return [one if isinstance(one, Mapping) else {name: one} for one in options or []]


def _list(texts: Sequence[object]) -> str:
    return f"<ul>{''.join(f'<li>{_value(text)}</li>' for text in texts)}</ul>" if texts else ""


def _facts(pairs: Sequence[tuple[str, object]]) -> str:
    if not pairs:
        return ""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{_value(value)}</dd>" for name, value in pairs) + "</dl>"


def _timings(timings: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Returns names without their unit and values with it."""
    return [
        (_words(name.removesuffix("_s")), f"{value:.2f} s" if _is_number(value) and not _is_ratio(name) else value)
        for name, value in timings.items()
    ]


def _is_ratio(name: str) -> bool:
    return "ratio" in name or "share" in name or "times" in name


def _words(name: str) -> str:
    return _HEADINGS.get(name, name.replace("_", " "))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_given(value: object) -> bool:
    return value is not None and value != ""


def _value(value: object) -> str:
    """Returns one value as HTML: numbers short, nothing as a dash, structures as JSON, text escaped."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return escape(f"{value:.6g}")
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(_words(str(name)))} {_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return f"<code>{escape(json.dumps(value, default=str))}</code>"
    return escape(str(value))
