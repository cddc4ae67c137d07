"""Charts without a script: every point is drawn where its value says, and texts stay texts."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from fleet.verify.page.line_chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, line_chart


def lines(chart: str) -> list[list[tuple[float, float]]]:
    """Returns the points of each line, in pixels."""
    found = ElementTree.fromstring(chart).iter("polyline")
    return [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in found]  # type: ignore[misc]


def texts(chart: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(chart).iter("text")]


def test_steps_go_across_and_values_up() -> None:
    [points] = lines(line_chart([Series("loss", [(1, 2.0), (2, 1.5), (3, 1.0)])], label="Loss"))
    assert [x for x, _ in points] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert [y for _, y in points] == [TOP, (TOP + HEIGHT - BOTTOM) / 2, HEIGHT - BOTTOM]


def test_a_logarithmic_axis_has_equal_decades_and_a_place_for_zero() -> None:
    chart = line_chart([Series("gradients", [(1, 0.0), (2, 1e-8), (3, 1e-6), (4, 1e-4)])], label="Off", log=True)
    [points] = lines(chart)
    heights = [y for _, y in points]
    assert heights[0] == HEIGHT - BOTTOM
    assert heights[3] == TOP
    assert heights[1] - heights[2] == pytest.approx(heights[2] - heights[3], abs=0.2)
    assert {"1e-4", "1e-8", "0"} <= set(texts(chart))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 3.7e-9, 2.5e12])
def test_one_value_alone_is_drawn(value: float, log: bool) -> None:
    [points] = lines(line_chart([Series("loss", [(1, value)])], label="Loss", log=log))
    assert all(math.isfinite(number) for point in points for number in point)
    assert TOP <= points[0][1] <= HEIGHT - BOTTOM


def test_what_is_no_number_has_no_point() -> None:
    made = [Series("loss", [(1, None), (2, math.nan), (3, math.inf), (4, 1.0), (5, 2.0)])]
    [points] = lines(line_chart(made, label="Loss"))
    assert len(points) == 2
    assert line_chart([Series("loss", [(1, None), (2, math.nan)])], label="Loss") == ""
    assert line_chart([], label="Loss") == ""


def test_many_steps_leave_room_between_their_numbers() -> None:
    chart = line_chart([Series("loss", [(n, 1.0 / n) for n in range(1, 101)])], label="Loss")
    assert len([text for text in texts(chart) if re.fullmatch(r"\d+", text) and int(text) > 1]) < 10


def test_names_are_escaped() -> None:
    chart = line_chart([Series('<b>"x"', [(1, 1.0)])], label="a < b & c")
    assert "<b>" not in chart
    assert ElementTree.fromstring(chart).find(".//svg").attrib["aria-label"] == "a < b & c"  # type: ignore[union-attr]
