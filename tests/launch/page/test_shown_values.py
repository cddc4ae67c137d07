"""Numbers and times as a reader expects them: no power of ten where it can be read without one."""

from __future__ import annotations

import math

import pytest

from fleet.launch.page.shown_values import about, clock, counted, duration, number, rate, shown, size


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.183372, "0.18337"), (21086.4, "21,086"), (0.0, "0"), (-2.5, "-2.5"), (3e-7, "3e-07"), (math.nan, "nan"),
     (math.inf, "inf"), (1e15, "1e+15")],
)  # fmt: skip
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(36.54, "36.5"), (1200.4, "1,200"), (0.7, "0.7"), (math.nan, "nan")])
def test_rates(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min"), (145, "2 min 25 s"), (3600, "1 h"), (90061, "1 d 1 h"), (math.inf, "11574 d 1 h"),
     (-3, "0 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_estimate_has_no_seconds_beyond_two_minutes() -> None:
    assert [about(s) for s in (5, 110, 118, 3630)] == ["about 5 s", "about 1 min 50 s", "about 2 min", "about 1 h"]


def test_the_rest() -> None:
    assert [size(n) for n in (0, 4, 111_156, 3 << 20, 1 << 40)] == ["0 B", "4 B", "109 KiB", "3 MiB", "1,024 GiB"]
    assert [counted(1, "row"), counted(11726, "row")] == ["1 row", "11,726 rows"]
    assert clock(-1e30) == clock(0)
    assert clock(1e30).startswith("9998")
    assert shown("a\x1b[31m<b>\r\n\x00") == "a&lt;b&gt;\n"
