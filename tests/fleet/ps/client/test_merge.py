"""Sums of gradients: order, averages, statistics (D.7, G11)."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.client.merge import merge_gradients, sum_by_id
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.ids import mean_of
from fleet.ps.table.layout import SparseTableConfig
from tests.fleet.ps.service import SGD, Gradient, ids, rows, serving


def test_sum_by_id_adds_from_left_to_right():
    rng = np.random.default_rng(0)
    keys = rng.zipf(1.3, 3000) % 50
    values = rng.standard_normal((3000, 3)).astype(np.float32)
    distinct, total = sum_by_id(keys, values)
    expected = {}
    for key, row in zip(keys.tolist(), values, strict=True):
        expected[key] = expected[key] + row if key in expected else row.copy()
    assert distinct.tolist() == sorted(expected)
    np.testing.assert_array_equal(total, np.array([expected[key] for key in sorted(expected)]))
    assert sum_by_id(ids(), np.empty((0, 3), np.float32))[1].shape == (0, 3)


def test_merging_sums_statistics():
    one = Gradient(ids(1, 2), np.ones((2, 2), np.float32), slots=np.array([5, 6], np.uint32))
    two = Gradient(
        ids(2, 9),
        np.full((2, 2), 3, np.float32),
        np.array([4, 1], np.float32),
        np.ones(2, np.float32),
        np.array([7, 8], np.uint32),
    )
    merged = merge_gradients([one, two], with_shows=True)
    assert merged.ids.tolist() == [1, 2, 9]
    assert merged.rows[:, 0].tolist() == [1, 4, 3]
    assert merged.shows.tolist() == [1, 5, 1]
    assert merged.clicks.tolist() == [0, 1, 1]
    assert merged.slots.tolist() == [5, 7, 8]
    with serving() as service:
        client = service.client(tables={0: SparseTableConfig("c", 2, SGD, accessor=Accessor())})
        client.wait(client.push({0: merged}))
        assert rows(client, [2])[0, 0] == -4


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_mean_is_the_sum_from_0_in_the_order_given(count):
    values = np.random.default_rng(1).standard_normal((count, 5000)).astype(np.float32)
    values[:, 7] = -0.0
    total = np.zeros(5000, np.float32)
    for one in values:
        total += one
    found = mean_of(list(values), 7)
    np.testing.assert_array_equal(found, total / np.float32(7))
    assert not np.signbit(found[7])


def test_a_mean_of_other_arrays_is_refused():
    with pytest.raises(ConfigError, match=r"arrays of \[3, 4\] numbers have no mean"):
        mean_of([np.zeros(3, np.float32), np.zeros(4, np.float32)], 2)
    with pytest.raises(ConfigError, match="values are float64"):
        mean_of([np.zeros(3)], 2)
