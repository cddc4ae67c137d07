"""Distinct ids of several arrays at once, and the gradients of bags by id."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.table.ids import UniqueKeys, sum_bags


def test_parts_are_as_calls_of_their_own() -> None:
    draw = np.random.default_rng(0)
    unique, alone = UniqueKeys(), UniqueKeys()
    assert unique.of_parts([]) == []
    for size in (5, 0, 3000, 40):
        parts = [draw.integers(-50, 50, count) for count in (size, 0, 7, 2 * size)]
        for part, (keys, inverse) in zip(parts, unique.of_parts(parts), strict=True):
            expected, places = alone(part)
            assert np.array_equal(keys, expected)
            assert np.array_equal(inverse, places)
            assert np.array_equal(keys[inverse], part)


def test_the_numbers_of_generations_begin_again() -> None:
    unique = UniqueKeys()
    parts = [np.array([5, 7, 5]), np.array([7, 8])]
    unique.of_parts(parts)
    unique._generation = 2**31 - 3
    for _ in range(3):
        assert [keys.tolist() for keys, _ in unique.of_parts(parts)] == [[5, 7], [7, 8]]
        assert unique._generation < 2**31


def test_gradients_of_bags_go_to_their_keys() -> None:
    gradients = np.array([[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]], np.float32)
    starts, inverse = np.array([0, 2, 2]), np.array([0, 1, 0, 0], np.int32)
    assert sum_bags(gradients, starts, inverse, 2).tolist() == [[11.0, 12.0], [1.0, 2.0]]
    assert sum_bags(gradients, starts, inverse, 2, is_mean=True).tolist() == [[5.5, 6.0], [0.5, 1.0]]


@pytest.mark.parametrize(
    ("starts", "inverse", "rule"),
    [([0, 3, 2], [0, 1, 0, 0], "starts where"), ([0, 2], [0, 1], "takes a gradient"), ([0, 1, 9], [0, 1], "starts"),
     ([0, 1, 2], [0, 5, 0], "below 2")],
)  # fmt: skip
def test_bags_that_do_not_fit_are_refused(starts: list[int], inverse: list[int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        sum_bags(np.zeros((3, 2), np.float32), np.array(starts), np.array(inverse, np.int32), 2)
