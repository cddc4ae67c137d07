"""The page of a demonstration: one file without a script, which any browser shows without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from days import Days
from formats.ids import ids_of
from simulator.items import CATEGORIES
from simulator.settings import TOPICS
from story import REPLICAS, Points, Story

SIZE = 1000  # of a plot, in its own units

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --page: #f6f7f9; --card: #fff; --rule: #dfe3e8;
  --bad: #b3261e22; --brake: #8a5a0026; --c0: #1f6fd1; --c1: #d9650b; --c2: #1d8a5f; --l: 88%; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9ef; --soft: #9aa6b5; --page: #14181e; --card: #1c222b;
  --rule: #333c48; --bad: #ff8a8040; --brake: #f0b95a33; --c0: #6cb0ff; --c1: #ff9d57; --c2: #58d3a2; --l: 26%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 20px 16px 40px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 6px; } h2 { font-size: 16px; margin: 26px 0 8px; } p { margin: 0 0 14px; }
figure, .card { margin: 0 0 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  padding: 12px 16px; }
figcaption { font-weight: 600; } .soft { color: var(--soft); font-weight: 400; }
.plot { position: relative; height: 210px; margin: 22px 8px 24px 46px; }
.plot.low { height: 120px; }
.plot svg { display: block; width: 100%; height: 100%; }
.plot span { position: absolute; font-size: 12px; color: var(--soft); white-space: nowrap; }
.y { right: calc(100% + 6px); transform: translateY(-50%); }
.x { top: calc(100% + 4px); transform: translateX(-50%); }
.day { bottom: calc(100% + 2px); transform: translateX(-50%); }
line, polyline { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--rule); } .version { stroke: var(--soft); stroke-dasharray: 3 4; }
polyline { stroke-width: 2; stroke-linejoin: round; } .points { stroke-width: 5; stroke-linecap: round; }
.bad { fill: var(--bad); } .brake { fill: var(--brake); }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.legend { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 18px; color: var(--soft);
  font-size: 13px; }
.legend svg { width: 22px; height: 10px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: 5px 0;
  border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; } th { font-weight: 400; color: var(--soft);
  width: 42%; padding-right: 14px; } tr:last-child > * { border-bottom: 0; } td { font-variant-numeric: tabular-nums; }
.user { display: grid; grid-template-columns: 120px minmax(0, 1fr); gap: 4px 12px; }
.user b { grid-column: 1 / -1; } .user div { display: flex; flex-wrap: wrap; gap: 4px; }
.chip { padding: 0 7px; border-radius: 9px; font-size: 12.5px; background: hsl(var(--h) 60% var(--l)); }
@media (max-width: 600px) { .user { grid-template-columns: 1fr; } figure, .card { padding: 10px; } }
"""


class Line(NamedTuple):
    """A line of a chart, or its points alone."""

    name: str
    points: Points
    alone: bool = False


def write_page(path: Path, story: Story, days: Days, portraits: Sequence[dict[str, Any]]) -> None:
    """Writes the page.

    Args:
        path: of the page.
        story: what happened.
        days: the shop.
        portraits: users: ``history``, ``shown`` and ``clicked``, ids of items.
    """
    facts = story.facts().items()
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    body = f"""<h1>Two towers, trained and served at once, and a bad day</h1>
<p class="soft">A job trains on the impressions of a shop, day after day, and names a version after each. Two replicas
of a service answer meanwhile which items are nearest to a user. On one day the impressions name the wrong items: a
guard takes both replicas back to the best version, and training goes back, too.</p>
{charts(story)}
<h2>Figures</h2><div class="card"><table>{rows}</table></div>
<h2>Users</h2><p class="soft">Categories of the items that a user clicked, oldest first, and of those that the service
answers with now, nearest first. Categories of a topic have a colour.</p>
{"".join(portrait(number, one, days) for number, one in enumerate(portraits, 1))}"""
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Two towers and a bad day</title><style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n",
        encoding="utf-8",
    )


def charts(story: Story) -> str:
    """Returns the charts: what is found, how fast, and how old it is."""
    newest = Line("newest rows, by the guard, among items on sale", story.points("score", "value", version=None))
    hits = Line("answers of the service", story.points("hits", "value"))
    replicas = [Line(f"{name} replica", story.points("answer", "ms", replica=name), alone=True) for name in REPLICAS]
    usual = float(np.percentile([ms for line in replicas for _, ms in line.points], 99.5))
    age = Line("both replicas", story.points("answer", "age_s"))
    exact = Line("answers of the service", story.points("hits", "recall"))
    return (
        Chart("Clicks of the next day that are found", "recall@50").of(story, [newest, hits])
        + Chart("Time of an answer for one user", "milliseconds", high=usual).of(story, replicas)
        + Chart("Age of the rows in an answer", "seconds").of(story, [age])
        + Chart("Index against the exact answer", "recall@50", is_low=True).of(story, [exact])
    )


class Chart(NamedTuple):
    """Lines over the seconds of a story, with its versions, its wrong data and its brake behind them.

    Args:
        title, unit: above the chart.
        high: where the values are cut off; None: above the highest.
        is_low: makes the chart less high.
    """

    title: str
    unit: str
    high: float | None = None
    is_low: bool = False

    def of(self, story: Story, lines: Sequence[Line]) -> str:
        """Returns the chart of one or more lines."""
        end = story.end()
        top, ticks = round_ticks(self.high or max((y for line in lines for _, y in line.points), default=1.0))
        spans = [("bad", *span) for span in story.bad_data()] + [("brake", *span) for span in story.braked]
        drawn = [
            f'<rect class="{kind}" x="{SIZE * begin / end:.1f}" width="{SIZE * (stop - begin) / end:.1f}" '
            f'height="{SIZE}"/>'
            for kind, begin, stop in spans
        ]
        drawn += [_line("grid", 0, SIZE, SIZE * (1 - y / top), SIZE * (1 - y / top)) for y in ticks]
        texts = [_text("y", "top", 1 - y / top, f"{y:g}") for y in ticks]
        texts += [_text("x", "left", x / end, f"{x:g} s") for x in round_ticks(end)[1] if x <= end]
        for marked in story.of("marked"):
            share = marked["at"] / end
            drawn.append(_line("version", SIZE * share, SIZE * share, 0, SIZE))
            texts.append(_text("day", "left", share, marked["name"].removeprefix("day-")))
        for number, line in enumerate(lines):
            places = [f"{SIZE * x / end:.1f},{SIZE * (1 - min(y, top) / top):.1f}" for x, y in line.points]
            paths = [f"{place} {place}" for place in places] if line.alone else [" ".join(places)]
            kind = f"points c{number}" if line.alone else f"c{number}"
            drawn += [f'<polyline class="{kind}" points="{path}"/>' for path in paths]
        label = escape(f"{self.title}, {self.unit}, over {end:.0f} seconds")
        return (
            f'<figure><figcaption>{escape(self.title)} <span class="soft">{escape(self.unit)}</span></figcaption>'
            f'<div class="plot{" low" if self.is_low else ""}"><svg viewBox="0 0 {SIZE} {SIZE}" '
            f'preserveAspectRatio="none" role="img" aria-label="{label}">{"".join(drawn)}</svg>{"".join(texts)}</div>'
            f"{legend(lines)}</figure>\n"
        )


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, side: str, share: float, text: str) -> str:
    return f'<span class="{kind}" style="{side}:{100 * share:.2f}%">{escape(text)}</span>'


def legend(lines: Sequence[Line]) -> str:
    """Returns what lines, bands and dashes mean."""

    def key(shape: str, text: str) -> str:
        return f'<li><svg viewBox="0 0 22 10">{shape}</svg>{escape(text)}</li>'

    stroke = '<polyline class="{}" points="0,5 22,5"/>'
    box = '<rect class="{}" width="22" height="10"/>'
    keys = [key(stroke.format(f"c{number}"), line.name) for number, line in enumerate(lines)]
    keys += [key(box.format("bad"), "trained on wrong items"), key(box.format("brake"), "readers are taken back")]
    keys.append(key(stroke.format("version"), "a version is marked, by day"))
    return f'<ul class="legend">{"".join(keys)}</ul>'


def round_ticks(high: float) -> tuple[float, list[float]]:
    """Returns a round value from ``high`` up, and the ticks from 0 to it.

    Example:
        >>> round_ticks(0.27)
        (0.3, [0.0, 0.1, 0.2, 0.3])
    """
    power = 10.0 ** np.floor(np.log10(max(high, 1e-9)))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if high <= 5 * power * part)
    count = int(np.ceil(high / step - 1e-9))
    return round(float(count * step), 10), [round(float(number * step), 10) for number in range(count + 1)]


def portrait(number: int, user: dict[str, Any], days: Days) -> str:
    """Returns what a user clicked and is shown."""
    parts = (("clicked before", user["history"]), ("shown now", user["shown"]), ("clicked next", [user["clicked"]]))
    rows = "".join(f'<span class="soft">{name}</span><div>{"".join(chips(days, items))}</div>' for name, items in parts)
    return f'<div class="card user"><b>User {number}</b>{rows}</div>\n'


def chips(days: Days, items: Sequence[int]) -> list[str]:
    """Returns the categories of items."""
    catalogue = days.catalogue
    places = torch.searchsorted(catalogue.item, torch.tensor(items))
    numbers = {int(one): number for number, one in enumerate(ids_of("category", CATEGORIES))}
    found = [numbers[one] for one in catalogue.columns(places)["category"].tolist()]
    return [
        f'<span class="chip" style="--h:{360 * (one % TOPICS) // TOPICS}" title="topic {one % TOPICS}">'
        f"{one % TOPICS}.{one // TOPICS}</span>"
        for one in found
    ]
