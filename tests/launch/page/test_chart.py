"""Charts: axes with their numbers, values for the pointer, parts that add up, and a scale that holds still."""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

import pytest

from fleet.launch.page.chart import Chart, thinned


def data(figure: str) -> Any:
    """Returns the values that the page's script reads."""
    found = re.search(r'data-points="([^"]*)"', figure)
    assert found is not None
    return json.loads(html.unescape(found[1]))


def points(text: str) -> list[list[float]]:
    return [[float(number) for number in pair.split(",")] for pair in text.split()]


def texts(figure: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", figure)


def test_a_line_stands_where_its_axes_say() -> None:
    figure = Chart(title="loss").of_line([(0, 2.0), (50, 1.0), (100, 0.0)])
    line = re.search(r'polyline points="([^"]*)"', figure)
    assert line is not None
    assert points(line[1]) == [[0, 0], [500, 500], [1000, 1000]]
    assert texts(figure) == ["0.0", "0.5", "1.0", "1.5", "2.0", "0", "20", "40", "60", "80", "100", "step"]
    assert '<b class="number">0</b>' in figure
    assert data(figure) == {
        "low": 0, "high": 100, "unit": "", "steps": [0, 50, 100], "lines": [["", [2.0, 1.0, 0.0]]]
    }  # fmt: skip


def test_no_style_is_written_into_the_markup() -> None:
    """The page's policy forbids it."""
    figures = Chart(title="a").of_line([(1, 1.0)]) + Chart(title="b").of_parts([("x", [(1, 1.0)])])
    assert "style=" not in figures


def test_what_is_no_number_is_left_out_and_named() -> None:
    figure = Chart(title="loss").of_line([(1, 1.0), (2, math.inf), (3, math.nan)])
    assert data(figure)["steps"] == [1]
    assert '<b class="number bad">nan</b>' in figure
    assert "<svg" not in Chart(title="loss").of_line([(1, math.nan)])


def test_parts_stand_on_each_other() -> None:
    parts = [("data", [(1, 1.0), (2, 2.0), (3, 9.0)]), ("forward", [(1, 3.0), (2, 2.0)])]
    figure = Chart(title="step", unit="ms", from_zero=True).of_parts(parts)
    edges = [points(text) for text in re.findall(r'polygon class="part\d" points="([^"]*)"', figure)]
    assert edges == [[[0, 750], [1000, 500], [1000, 1000], [0, 1000]], [[0, 0], [1000, 0], [1000, 500], [0, 750]]]
    assert data(figure)["lines"] == [["data", [1.0, 2.0]], ["forward", [3.0, 2.0]], ["all", [4.0, 4.0]]]
    for text in ("step, ms", '<b class="number">4 ms</b>', "2 ms", "50 %"):
        assert text in figure


def test_a_rare_value_far_above_does_not_set_the_scale_and_is_named() -> None:
    points = [(step, 135.0 if step == 30 else 20.0) for step in range(60)]
    figure = Chart(title="step", unit="ms", from_zero=True, cuts=True).of_line(points)
    assert "cut off above 30 ms; the most is 135 ms" in figure
    assert "cut off" not in Chart(title="step", unit="ms", from_zero=True).of_line(points)


def test_a_line_that_grows_keeps_its_points_until_the_next_doubling() -> None:
    points = [(step, float(step)) for step in range(5000)]
    before, after = (thinned(points[:n]) for n in (3000, 3100))
    assert set(before[:-1]) <= set(after)
    for number in (1, 240, 241, 480, 481, 5000):
        kept = thinned(points[:number])
        assert (kept[0], kept[-1]) == (points[0], points[number - 1])
        assert 1 <= len(kept) <= 242
        assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 5e-324, 0.0])
def test_every_finite_value_is_drawn(value: float) -> None:
    for values in ([value], [value, -value], [value, 1.0]):
        figure = Chart(title="loss").of_line(list(enumerate(values)))
        assert not re.search(r"nan|inf", figure)
        assert data(figure)["steps"] == list(range(len(values)))
