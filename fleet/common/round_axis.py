"""round_axis: ends and ticks of a linear axis at round values, for charts."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

__all__ = ["RoundAxis", "round_axis"]

_SMALLEST = 1e-290  # below it a power of ten loses digits
_MOST = sys.float_info.max
_LARGEST = 1e305  # above it the round value beyond the range may be infinite


@dataclass(frozen=True)
class RoundAxis:
    """A linear axis from ``low`` to ``high``; each tick is a value and its text."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Returns how far along the axis ``value`` lies, 0 at its low end and 1 at its high end."""
        # In halves, because the difference of two large floats may overflow to infinity.
        return (value / 2 - self.low / 2) / ((self.high / 2 - self.low / 2) or 1.0)


def round_axis(low: float, high: float, *, most_parts: int = 5, least_tick: float = 0.0) -> RoundAxis:
    """Returns the axis around ``low`` to ``high`` whose ends and ticks are multiples of 1, 2 or 5 times a power of ten.

    The ends are round too, so an axis that follows a growing range changes seldom.

    Args:
        low, high: finite values; equal ones get some room on both sides.
        most_parts: most ticks that the range itself holds.
        least_tick: least distance of two ticks, such as 1 for an axis of whole numbers.

    Example:
        >>> [text for _, text in round_axis(0.3, 2.2).ticks]
        ['0.0', '0.5', '1.0', '1.5', '2.0', '2.5']
    """
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = max(low - room, -_MOST), min(low + room, _MOST)
    rough = max((high / 2 - low / 2) / most_parts * 2, least_tick)
    if not _SMALLEST < rough < _LARGEST:
        return RoundAxis(low, high, ((low, f"{low:.3g}"), (high, f"{high:.3g}")))
    digits = math.floor(math.log10(rough))
    power = 10.0**digits
    tick = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.floor(low / tick)
    last = max(math.ceil(high / tick), first + 1)
    values = [n * tick for n in range(first, last + 1)]
    return RoundAxis(values[0], values[-1], tuple((value, _text(value, tick)) for value in values))


def _text(value: float, tick: float) -> str:
    """Returns ``value`` with the decimals that ``tick`` needs; as a power of ten where zeros take too much room."""
    largest = max(abs(value), tick)
    if largest >= 1e7 or tick < 1e-6:
        return f"{value:.4g}"
    decimals = max(0, -math.floor(math.log10(tick) + 1e-9))
    return f"{value:,.{decimals}f}"
