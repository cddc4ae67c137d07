"""Axes at round values: they hold their range, change seldom, and take every float."""

from __future__ import annotations

import math

import pytest

from fleet.common.round_axis import round_axis


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.3, 2.2, ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
        (0, 31228, ["0", "10,000", "20,000", "30,000", "40,000"]),
        (0.6931, 0.6933, ["0.69310", "0.69315", "0.69320", "0.69325", "0.69330"]),
        (-3, 3, ["-4", "-2", "0", "2", "4"]),
        (0, 4e9, ["0", "1e+09", "2e+09", "3e+09", "4e+09"]),
    ],
)
def test_ticks_are_round(low: float, high: float, texts: list[str]) -> None:
    axis = round_axis(low, high)
    assert [text for _, text in axis.ticks] == texts
    assert axis.low <= low < high <= axis.high


def test_a_growing_range_moves_the_axis_seldom() -> None:
    assert len({round_axis(0, steps, least_tick=1.0).high for steps in range(1, 1000)}) < 40


def test_whole_numbers_have_whole_ticks() -> None:
    assert [text for _, text in round_axis(3, 5, least_tick=1.0).ticks] == ["3", "4", "5"]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1.0, 1.0), (0.0, 0.0), (-1.7e308, 1.7e308), (1.7e308, 1.75e308), (0.0, 5e-324), (1e16, 1e16 + 2), (-5.0, -5.0)],
)
def test_every_float_has_a_place(low: float, high: float) -> None:
    axis = round_axis(low, high)
    assert 2 <= len(axis.ticks) < 12
    for value in (low, high, *(tick for tick, _ in axis.ticks)):
        assert math.isfinite(value)
        assert -0.01 <= axis.share(value) <= 1.01
