"""Charts of the page: axes with round ticks, lines or stacked parts, and their values for the page's script.

The plot is a picture that is stretched to its place, and the numbers beside it stand at shares of its height and width,
so text keeps its size on every screen. No style is written into the markup, which the page's policy forbids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from fleet.common.round_axis import RoundAxis, round_axis
from fleet.launch.page.shown_values import number, rate

Points = Sequence[tuple[int, float]]
_MOST_POINTS = 240
_SIZE = 1000  # of the plot, in its own units
_FURTHEST = 10 * _SIZE  # where values beyond the axis are drawn, out of sight
_MOST_STEPS = 5  # ticks along
_FEWEST_TO_CUT = 20
_CUT_ABOVE = 3.0  # times the value that 19 of 20 stay below


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The look of one chart.

    Args:
        title: above it.
        unit: behind each value; "" for none.
        from_zero: the axis begins at zero.
        cuts: few values far above all others do not set the scale; the chart says that they are cut off.
    """

    title: str
    unit: str = ""
    from_zero: bool = False
    cuts: bool = False

    def of_line(self, points: Points) -> str:
        """Returns the chart of one line; values that are not finite are left out of the line."""
        kept = thinned([point for point in points if math.isfinite(point[1])])
        steps = [step for step, _ in kept]
        values = [value for _, value in kept]
        is_finite = math.isfinite(points[-1][1])
        # A page that is read from afar has to show that a loss is no number.
        newest = f'<b class="number{"" if is_finite else " bad"}">{self._valued(points[-1][1])}</b>'
        if not kept:
            return f'<figure class="chart">{self._caption(newest)}</figure>'
        up, note = self._up(values, min(0.0, *values) if self.from_zero else min(values))
        along = _along(steps)
        lines = f'<polyline points="{_path(along, up, steps, values)}"/>'
        if len(kept) == 1:
            lines += _dot(along, up, steps[0], values[0])
        plot = self._plot(along, up, lines)
        return self._figure(newest, plot, note, steps, [("", values)])

    def of_parts(self, parts: Sequence[tuple[str, Points]]) -> str:
        """Returns the chart of parts that stand on each other, with each one's newest value and share below it.

        Steps that one of the parts lacks are left out.
        """
        known = [{step: max(value, 0.0) for step, value in points if math.isfinite(value)} for _, points in parts]
        steps = [step for step, _ in thinned([(step, 0.0) for step in sorted(set(known[0]).intersection(*known[1:]))])]
        if not steps:
            return ""
        columns = [list(accumulate(one[step] for one in known)) for step in steps]
        totals = [column[-1] for column in columns]
        up, note = self._up(totals, 0.0)
        along = _along(steps)
        areas = []
        below = [0.0] * len(steps)
        for i in range(len(parts)):
            above = [column[i] for column in columns]
            edge = f"{_path(along, up, steps, above)} {_path(along, up, steps[::-1], below[::-1])}"
            areas.append(f'<polygon class="part{i}" points="{edge}"/>')
            below = above
        newest = f'<b class="number">{self._valued(totals[-1])}</b>'
        plot = self._plot(along, up, "".join(areas)) + self._legend([name for name, _ in parts], columns[-1])
        series = [(name, [one[step] for step in steps]) for (name, _), one in zip(parts, known, strict=True)]
        return self._figure(newest, plot, note, steps, [*series, ("all", totals)])

    def _valued(self, value: float) -> str:
        return (f"{rate(value)} {escape(self.unit)}") if self.unit else number(value)

    def _caption(self, newest: str) -> str:
        unit = f", {self.unit}" if self.unit else ""
        return f"<figcaption><span>{escape(self.title + unit)}</span>{newest}</figcaption>"

    def _up(self, values: Sequence[float], low: float) -> tuple[RoundAxis, str]:
        """Returns the axis of the values, and the sentence about values that are cut off."""
        high = max(values)
        usual = sorted(values)[int(0.95 * (len(values) - 1))]
        if self.cuts and len(values) >= _FEWEST_TO_CUT and high > _CUT_ABOVE * usual > 0:
            axis = round_axis(low, 1.5 * usual)
            return axis, f"cut off above {self._valued(axis.high)}; the most is {self._valued(high)}"
        return round_axis(low, high), ""

    def _plot(self, along: RoundAxis, up: RoundAxis, drawn: str) -> str:
        box = f'viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none"'
        label = f"{self.title}: steps {along.low:.0f} to {along.high:.0f}, {number(up.low)} to {number(up.high)}"
        grid = "".join(
            f'<line x1="0" x2="{_SIZE}" y1="{y:.0f}" y2="{y:.0f}"/>'
            for y in (_SIZE * (1 - up.share(value)) for value, _ in up.ticks)
        )
        values = "".join(
            f'<text x="100%" y="{100 * (1 - up.share(value)):.2f}%" dy="4">{text}</text>' for value, text in up.ticks
        )
        steps = "".join(
            f'<text class="{_anchor(along.share(step))}" x="{100 * along.share(step):.2f}%" y="12">{text}</text>'
            for step, text in along.ticks
        )
        return (
            f'<div class="plot"><svg class="up" aria-hidden="true">{values}</svg>'
            f'<svg class="field" {box} role="img" aria-label="{escape(label)}">{grid}{drawn}'
            f'<line class="cross" x1="0" x2="0" y1="0" y2="{_SIZE}"/></svg>'
            f'<svg class="along" aria-hidden="true">{steps}<text class="middle" x="50%" y="26">step</text></svg></div>'
        )

    def _legend(self, names: Sequence[str], sums: Sequence[float]) -> str:
        """Returns the newest values of the parts, from their running ``sums``."""
        items = []
        for i, name in enumerate(names):
            value = sums[i] - (sums[i - 1] if i else 0.0)
            share = 100 * value / sums[-1] if sums[-1] else 0.0
            items.append(
                f'<li><i class="part{i}"></i>{escape(name)} <span class="number">{self._valued(value)}</span> '
                f'<span class="quiet number">{share:.0f} %</span></li>'
            )
        return f'<ul class="legend">{"".join(items)}</ul>'

    def _figure(
        self, newest: str, body: str, note: str, steps: Sequence[int], series: Sequence[tuple[str, Sequence[float]]]
    ) -> str:
        """Returns the figure, with its values for the pointer as JSON in an attribute."""
        along = _along(steps)
        lines = [[name, [float(f"{value:.6g}") for value in values]] for name, values in series]
        found = {"low": along.low, "high": along.high, "unit": self.unit, "steps": list(steps), "lines": lines}
        data = escape(json.dumps(found, separators=(",", ":")))
        kind = " parts" if len(series) > 1 else ""
        said = f'<p class="quiet note">{note}</p>' if note else ""
        return f'<figure class="chart{kind}" data-points="{data}">{self._caption(newest)}{body}{said}</figure>'


def thinned(points: Points) -> Points:
    """Returns at most 241 of ``points``, the first and the last among them.

    Of each two, four, eight ... neighbours the last stays, so a line that grows keeps the points it was drawn through
    until the next doubling.
    """
    apart = 1
    while len(points) > _MOST_POINTS * apart:
        apart *= 2
    if apart == 1:
        return points
    kept = [points[0], *points[apart - 1 :: apart]]
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _along(steps: Sequence[int]) -> RoundAxis:
    # A single point stands at the end of what came before it.
    first = steps[0] if len(steps) > 1 else min(0, steps[0])
    return round_axis(first, max(steps[-1], first + 1), most_parts=_MOST_STEPS, least_tick=1.0)


def _anchor(share: float) -> str:
    """Returns where a number stands to its tick, so that the outer ones are not cut."""
    return "start" if share < 0.02 else "end" if share > 0.98 else "middle"


def _place(along: RoundAxis, up: RoundAxis, step: int, value: float) -> tuple[float, float]:
    y = _SIZE * (1 - up.share(value))
    return _SIZE * along.share(step), min(max(y, -_FURTHEST), _FURTHEST)


def _path(along: RoundAxis, up: RoundAxis, steps: Sequence[int], values: Sequence[float]) -> str:
    places = (_place(along, up, step, value) for step, value in zip(steps, values, strict=True))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _dot(along: RoundAxis, up: RoundAxis, step: int, value: float) -> str:
    """Returns a mark for a single point, which a line cannot show: its ends are round, and it has no length."""
    x, y = _place(along, up, step, value)
    return f'<line class="dot" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
