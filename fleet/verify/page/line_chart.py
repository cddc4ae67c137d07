"""Line charts as inline SVG: no script, colours from the page's style sheet, text that is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fleet.common.round_axis import round_axis

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 38
_MOST_TICKS = 7


@dataclass(frozen=True)
class Series:
    """A line: its name, and its points as (step, value); a value that is None or not finite has no point."""

    name: str
    points: Sequence[tuple[float, float | None]]

    def drawn(self) -> list[tuple[float, float]]:
        """Returns the points that can be drawn."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class _Axis:
    """Places values between ``low`` and ``high`` on pixels ``start`` to ``end``; a log axis has its zero at the end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            value = self.low if value <= 0 else max(math.log10(value), self.low)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def line_chart(series: Sequence[Series], *, label: str, log: bool = False) -> str:
    """Returns an ``<svg>`` with a line for each series over the steps, and a legend; ``""`` where nothing can be drawn.

    With ``log`` the values stand on a logarithmic scale of decades, and zeros on its lower edge. ``label`` says to a
    screen reader what the chart shows. Lines have the classes ``line0``, ``line1`` ...; the page gives them colours.

    Example:
        >>> line_chart([Series("loss", [(1, 0.5), (2, 0.25)])], label="Loss").startswith("<figure")
        True
    """
    kept = [one for one in series if one.drawn()]
    points = [point for one in kept for point in one.drawn()]
    if not points:
        return ""
    steps = [x for x, _ in points]
    values = [y for _, y in points]
    across = _Axis(*_apart(min(steps), max(steps), 0.5), LEFT, WIDTH - RIGHT)
    low, high, ticks = _decades(values) if log else _round_values(values)
    up = _Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    parts = [*_value_grid(up, ticks), *_step_marks(across, sorted(set(steps)))]
    for i, one in enumerate(kept):
        parts += _line(i, one, across, up)
    legend = "".join(f'<li class="key{i}">{escape(one.name)}</li>' for i, one in enumerate(kept))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
        f'<figcaption>{escape(label)}<ul class="legend">{legend}</ul></figcaption></figure>'
    )


def _apart(low: float, high: float, by: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - by, high + by)


def _value_grid(up: _Axis, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """Returns a line across for each tick, with its text on the left."""
    parts = []
    for value, text in ticks:
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    return parts


def _step_marks(across: _Axis, steps: Sequence[float]) -> list[str]:
    """Returns the numbers of the steps below the chart: all of them, or evenly chosen ones."""
    stride = math.ceil(len(steps) / _MOST_TICKS)
    y = HEIGHT - BOTTOM + 16
    marks = [
        f'<text x="{across.place(step):.1f}" y="{y}" text-anchor="middle">{step:g}</text>' for step in steps[::stride]
    ]
    return [*marks, f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}" text-anchor="middle">step</text>']


def _line(i: int, series: Series, across: _Axis, up: _Axis) -> list[str]:
    """Returns the line and its points, each with a title that a pointer shows."""
    places = [(across.place(x), up.place(y)) for x, y in series.drawn()]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = []
    for (x, y), (step, value) in zip(places, series.drawn(), strict=True):
        title = f"{series.name}, step {step:g}: {value:.6g}"
        dots.append(f'<circle class="dot{i}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(title)}</title></circle>')
    return [f'<polyline class="line{i}" points="{path}"/>', *dots]


def _round_values(values: Sequence[float]) -> tuple[float, float, Sequence[tuple[float, str]]]:
    """Returns both ends of a linear axis and its ticks."""
    axis = round_axis(min(values), max(values), most_parts=4)
    return axis.low, axis.high, axis.ticks


def _decades(values: Sequence[float]) -> tuple[float, float, list[tuple[float, str]]]:
    """Returns both ends of a logarithmic axis, as powers of ten, and its ticks; zeros get the lower end."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    zeros = any(value <= 0 for value in values)
    # A zero has no logarithm: it gets a decade of its own below the others.
    low = math.floor(min(logs)) - zeros
    high = max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    stride = math.ceil((high - low) / _MOST_TICKS)
    ticks = [(10.0**n, f"1e{n:d}") for n in range(high, low - 1 + zeros, -stride)]
    return float(low), float(high), [*ticks, *([(0.0, "0")] if zeros else [])]
