"""What a report of ``fleet verify`` is worth: a verdict for each script, and the table of all of them.

Everything here is a function of the reports; nothing runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED = "named"
OTHER_CAUSE = "noticed, another cause"
MISSED = "missed"
NOT_COMPARED = "not compared"
FALSE_ALARM = "false alarm"
EQUAL = "equal"
NOT_RUN = "not run"
TOO_THIN = "missed, report too thin"

# In the order of the totals.
OF_BUGS = (NAMED, OTHER_CAUSE, MISSED, TOO_THIN, NOT_COMPARED, NOT_RUN)
OF_RIGHT = (EQUAL, FALSE_ALARM, NOT_COMPARED, NOT_RUN)
_LONGEST_REASON = 160


@dataclass(frozen=True)
class Verdict:
    """What a report says of a script: ``cause`` is the one it names, ``reason`` what it says beside that."""

    kind: str
    cause: str = ""
    reason: str = ""
    where: str = ""

    def __str__(self) -> str:
        says = ": ".join(part for part in (self.cause and f"`{self.cause}`", self.reason) if part)
        return f"{self.kind}: {says}" if says else self.kind


def judge(entry: dict[str, Any] | None, causes: Sequence[str] | None = None) -> Verdict:
    """Returns the verdict on one script.

    ``entry`` is a line of the results: its ``report`` as JSON, or the ``failure`` for which there is none. ``causes``
    are the names that say what is wrong with a script; ``None`` says that it is correct. The first finding counts: a
    right name further down is not what a reader sees first. Where nothing differs that is the first warning, which
    names a bug and accuses no correct script.
    """
    if entry is None:
        return Verdict(NOT_RUN)
    report = entry["report"]
    if report is None:
        return Verdict(NOT_COMPARED, reason=_short(entry["failure"]))
    if report["outcome"] == "not_comparable":
        return Verdict(NOT_COMPARED, reason=_short(next(iter(report["notes"]), "no reason given")))
    if report["outcome"] == "equal":
        warned = [one for one in report.get("warnings", ())[:1] if causes is not None and one["cause"] in causes]
        if warned:
            return Verdict(NAMED, warned[0]["cause"], where=warned[0]["where"] or "")
        return Verdict(EQUAL if causes is None else MISSED)
    first = report["findings"][0]
    where = first["where"] or ""
    if causes is None:
        return Verdict(FALSE_ALARM, first["cause"], _short(first["sentence"]), where)
    if first["cause"] in set(causes) - {"unknown"}:
        return Verdict(NAMED, first["cause"], where=where)
    return Verdict(OTHER_CAUSE, first["cause"], _short(first["sentence"]), where)


def is_at_line(where: str, script: Path, line: str) -> bool:
    """Returns whether ``where``, a file and the number of a line, is the line of ``script`` that holds ``line``."""
    file, _, number = where.rpartition(":")
    if not line or Path(file).name != script.name or not number.isdecimal():
        return False
    text = script.read_text(encoding="utf-8").splitlines()
    return 0 < int(number) <= len(text) and line.strip() in text[int(number) - 1]


@dataclass(frozen=True)
class Row:
    """One case of the table: its two verdicts, and what its writer expected."""

    name: str
    url: str
    engine: str
    aside: bool
    wrong: Verdict
    right: Verdict
    has_line: bool = False


def table(rows: Sequence[Row], correct: Sequence[tuple[str, Verdict]], left_out: Iterable[tuple[str, str]]) -> str:
    """Returns the tables in markdown: the totals, every case, every correct script, and what is left out and why."""
    lines = ["| scripts | " + " | ".join(OF_BUGS) + " | of |", "| --- |" + " ---: |" * (len(OF_BUGS) + 1)]
    for title, part in (("cases", [r for r in rows if not r.aside]), ("kept aside", [r for r in rows if r.aside])):
        lines.append(_totals(title, [row.wrong.kind for row in part], OF_BUGS))
    lines += ["", "| correct scripts | " + " | ".join(OF_RIGHT) + " | of |"]
    lines.append("| --- |" + " ---: |" * (len(OF_RIGHT) + 1))
    lines.append(_totals("cases, mended", [r.right.kind for r in rows if r.wrong.kind != TOO_THIN], OF_RIGHT))
    lines.append(_totals("public kinds", [verdict.kind for _, verdict in correct], OF_RIGHT))
    lines += ["", "| case | engine | with the bug | its line named | mended |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        name = f"[{row.name}]({row.url})" + (" (aside)" if row.aside else "")
        line = "yes" if row.has_line else "no"
        lines.append(f"| {name} | {row.engine} | {row.wrong} | {line if row.wrong.where else ''} | {row.right} |")
    lines += ["", "| correct script | verdict |", "| --- | --- |"]
    lines += [f"| {name} | {verdict} |" for name, verdict in correct]
    reasons = [f"- {name}: {reason}" for name, reason in left_out]
    return "\n".join([*lines, *(["", "Left out:", "", *reasons] if reasons else [])]) + "\n"


def _totals(title: str, kinds: Sequence[str], order: Sequence[str]) -> str:
    counts = Counter(kinds)
    return f"| {title} | " + " | ".join(str(counts[kind]) for kind in order) + f" | {len(kinds)} |"


def _short(text: str) -> str:
    """Returns the beginning of ``text`` as one line that a cell of a table can hold."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."
