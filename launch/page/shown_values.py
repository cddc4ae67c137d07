"""Numbers, times and logs as the page writes them; everything that comes from outside is escaped here."""

from __future__ import annotations

import math
import re
import time
from html import escape

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_LAST_SECOND = 253_370_764_799  # of the year 9998
# Escape sequences that colour a terminal, and characters that no browser shows.
_UNSHOWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_LONGEST_S = 1e9


def number(value: float) -> str:
    """Returns ``value`` in about five digits, without a power of ten where it can be read without one.

    Example:
        >>> number(21086.4), number(0.183372)
        ('21,086', '0.18337')
    """
    if not math.isfinite(value) or (value and not 1e-4 <= abs(value) < 1e12):
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"


def rate(value: float) -> str:
    """Returns a rate in about three digits, also of large numbers."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e12 else f"{value:.3g}"


def size(num_bytes: float) -> str:
    """Returns ``num_bytes`` in the largest unit that fits."""
    unit, unit_bytes = next((pair for pair in _UNITS if num_bytes >= pair[1]), ("B", 1))
    return f"{rate(num_bytes / unit_bytes)} {unit}"


def counted(count: float, singular: str) -> str:
    """Returns a count with its noun.

    Example:
        >>> counted(11726, "row"), counted(1, "element")
        ('11,726 rows', '1 element')
    """
    return f"{count:,.0f} {singular}{'s' * (count != 1)}"


def clock(seconds: float) -> str:
    """Returns a time since the epoch as a date and a time of day."""
    # A file may bear any time, also one that localtime() refuses.
    seconds = min(max(seconds, 0.0), _LAST_SECOND)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float) -> str:
    """Returns a length of time in its two largest units.

    Example:
        >>> duration(7), duration(145), duration(90061)
        ('7 s', '2 min 25 s', '1 d 1 h')
    """
    whole = round(min(max(seconds, 0.0), _LONGEST_S))
    for unit, unit_s, below, below_s in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit_s:
            rest = whole % unit_s // below_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def about(seconds: float) -> str:
    """Returns a length of time that is an estimate, in whole minutes from two minutes on.

    Example:
        >>> about(178), about(61)
        ('about 3 min', 'about 1 min 1 s')
    """
    return f"about {duration(seconds if seconds < 115 else round(seconds / 60) * 60)}"


def shown(text: str) -> str:
    """Returns ``text`` escaped, without what no browser shows."""
    return escape(_UNSHOWN.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
