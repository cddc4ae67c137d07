"""Sums of gradients: order, averages, statistics (D.7, G11)."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.client.merge import merge_gradients, sum_by_id
from fleet.ps.server.served_table import ServedDense, merge_parts
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.ids import mean_of
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import rule_from_paddle
from fleet.ps.wire.messages import TablePart
from tests.fleet.ps.service import SGD, ZEROS, Gradient, ids, rows, serving


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


def test_statistics_are_summed_where_gradients_are_averaged():
    def part(keys, value, shows):
        return TablePart(1, len(keys), 1, ids(*keys), np.full((len(keys), 1), value, np.float32), shows)

    one = part([1, 2], 4.0, np.array([3, 1], np.float32))
    two = part([2], 2.0, None)
    merged = merge_parts([one, two], 2, with_shows=True)
    assert merged.ids.tolist() == [1, 2]
    assert merged.rows[:, 0].tolist() == [2, 3]
    assert merged.shows.tolist() == [3, 2]


def test_two_workers_move_rows_as_one_process_does_where_the_rule_divides_by_shows():
    """G11, D.5: the mean gradient over all shows, whatever the rules of the two halves of a row."""
    adagrad = rule_from_paddle("adagrad", {"learning_rate": 1.0})
    config = SparseTableConfig("c", 3, adagrad, embed_rule=SGD, accessor=Accessor(), initializer=ZEROS)
    one, two = ([[1.0, 2.0, 3.0]], 1.0), ([[3.0, 4.0, 9.0]], 3.0)

    def pushed(client, value, show):
        gradient = Gradient(ids(7), np.array(value, np.float32), np.array([show], np.float32))
        return client.wait(client.push({0: gradient}))

    with serving(mode="sync", num_workers=2) as service:
        clients = [service.client(rank, tables={0: config}) for rank in range(2)]
        for client, half in zip(clients, (one, two), strict=True):
            rows(client, [7])
            pushed(client, *half)
        together = rows(clients[0], [7])
    with serving(mode="sync") as service:
        client = service.client(tables={0: config})
        rows(client, [7])
        pushed(client, [[2.0, 3.0, 6.0]], 4.0)
        np.testing.assert_array_equal(rows(client, [7]), together)
    np.testing.assert_allclose(together, [[-2, -0.75, -1.5]], rtol=1e-6)


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


def test_the_mean_of_dense_parts_is_made_where_it_is_applied():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 70_001, 1)).astype(np.float32)
    merged = merge_parts([TablePart(0, 70_001, 1, rows=rows) for rows in values], 3)
    assert (merged.table_id, merged.n, merged.rows) == (0, 70_001, None)
    served = ServedDense(DenseTable(DenseTableConfig("d", 70_001, SGD)))
    served.push(merged)
    mean = (values[0] + values[1] + values[2]) / np.float32(3)
    np.testing.assert_array_equal(served.table.pull(), -mean.reshape(-1))


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
