"""Means of the gradients of a step: order, statistics, tables that come together (D.5, G11)."""

from __future__ import annotations

import numpy as np

from fleet.ps.server.mean_parts import merge_parts, parts_alike
from fleet.ps.server.served_table import ServedDense
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.layout import SparseTableConfig
from fleet.ps.table.rules import rule_from_paddle
from fleet.ps.wire.messages import TablePart, join_parts
from tests.fleet.ps.service import SGD, ZEROS, Gradient, ids, rows, serving


def test_statistics_are_summed_where_gradients_are_averaged():
    def part(keys, value, shows):
        return TablePart(1, len(keys), 1, ids(*keys), np.full((len(keys), 1), value, np.float32), shows)

    one = part([1, 2], 4.0, np.array([3, 1], np.float32))
    two = part([2], 2.0, None)
    merged = merge_parts([one, two], 2, with_shows=True)
    assert merged.ids.tolist() == [1, 2]
    assert merged.rows[:, 0].tolist() == [2, 3]
    assert merged.shows.tolist() == [3, 2]


def test_tables_are_merged_together_as_each_alone():
    """Whatever tables the parts of a step hold, and however each worker groups them."""
    rng = np.random.default_rng(0)

    def part(table_id, n, dim=3):
        keys = rng.permutation(40)[:n].astype(np.int64)
        return TablePart(table_id, n, dim, keys, rng.standard_normal((n, dim), np.float32))

    workers = [[part(7, 30), part(2, 9), part(5, 20, dim=2)], [part(2, 25), part(9, 4), part(7, 11)]]
    sent = [[join_parts(workers[0][:2]), workers[0][2]], [join_parts(workers[1])]]
    alike = parts_alike([one for worker in sent for one in worker], lambda table_id: False)
    merged = {one.table_id: one for some in alike for one in merge_parts(some, 2).each()}
    assert sorted(merged) == [2, 5, 7, 9]
    for table_id, found in merged.items():
        alone = merge_parts([one for worker in workers for one in worker if one.table_id == table_id], 2)
        np.testing.assert_array_equal(found.ids, alone.ids)
        np.testing.assert_array_equal(found.rows, alone.rows)


def test_tables_with_shows_or_slots_are_merged_apart_from_others():
    """A show of 1 for an id is another update than none, and slot 0 another slot than the row's."""
    one = np.ones((1, 1), np.float32)
    plain, shown, slotted = (TablePart(number, 1, 1, ids(1), one) for number in (0, 1, 2))
    also_shown = TablePart(1, 1, 1, ids(1), one, np.full(1, 5, np.float32))
    also_slotted = TablePart(2, 1, 1, ids(1), one, slots=np.full(1, 6, np.uint32))
    both = join_parts([plain, shown, slotted])
    alike = parts_alike([both, also_shown, also_slotted], lambda table_id: False)
    found = {one.table_id: one for some in alike for one in [merge_parts(some, 2)]}
    assert {number: part.shows is None for number, part in found.items()} == {0: True, 1: False, 2: True}
    assert found[1].shows.tolist() == [6]
    assert {number: part.slots is None for number, part in found.items()} == {0: True, 1: True, 2: False}
    assert found[2].slots.tolist() == [6]


def test_a_step_without_a_row_changes_nothing():
    none = TablePart(4, 0, 2, ids(), np.empty((0, 2), np.float32))
    merged = merge_parts([none, none], 2)
    assert (merged.table_id, merged.n, merged.members) == (4, 0, None)


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


def test_the_mean_of_dense_parts_is_made_where_it_is_applied():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 70_001, 1)).astype(np.float32)
    merged = merge_parts([TablePart(0, 70_001, 1, rows=rows) for rows in values], 3)
    assert (merged.table_id, merged.n, merged.rows) == (0, 70_001, None)
    served = ServedDense(DenseTable(DenseTableConfig("d", 70_001, SGD)))
    served.push(merged)
    mean = (values[0] + values[1] + values[2]) / np.float32(3)
    np.testing.assert_array_equal(served.table.pull(), -mean.reshape(-1))
