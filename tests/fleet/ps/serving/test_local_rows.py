from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.serving.local_rows import LocalState, TableShare, check_table
from fleet.ps.serving.mapped_rows import MappedRows

NONE = np.empty(0, np.int64)


def rows_of(values: list[float]) -> MappedRows:
    return MappedRows(np.array(values, np.float32).view(np.uint8), 1)


def test_the_newest_of_a_share_counts_and_deleted_rows_are_gone() -> None:
    share = TableShare().extended(np.array([1, 2, 3]), np.array([0, 4, 8]), rows_of([1, 2, 3]))
    second = share.extended(np.array([2]), np.array([0]), rows_of([20]), np.array([3]))
    third = second.extended(np.array([3]), np.array([0]), rows_of([30]), np.array([2]))
    ids = np.array([1, 2, 3, 4])
    for state, rows, found in (
        (share, [1, 2, 3, 0], [True, True, True, False]),
        (second, [1, 20, 0, 0], [True, True, False, False]),
        (third, [1, 0, 30, 0], [True, False, True, False]),
    ):
        values, mask = LocalState({"ads": 1}, {("ads", 0): state}).lookup("ads", ids)
        assert values[:, 0].tolist() == rows
        assert mask.tolist() == found


def test_few_indexes_stand_for_many_deltas() -> None:
    share = TableShare().extended(np.arange(10_000), 4 * np.arange(10_000), rows_of([0.0] * 10_000))
    for number in range(200):
        share = share.extended(np.arange(number, number + 10), 4 * np.arange(10), rows_of([float(number)] * 10))
    assert len(share.indexes) <= 10
    values, _ = LocalState({"ads": 1}, {("ads", 0): share}).lookup("ads", np.arange(210))
    assert values[:, 0].tolist() == [float(number) for number in range(200)] + [199.0] * 9 + [0.0]


def test_shares_of_several_servers_and_other_tables() -> None:
    shares = {
        ("ads", 0): TableShare().extended(np.array([1]), np.array([0]), rows_of([1])),
        ("users", 0): TableShare().extended(np.array([1, 2]), np.array([0, 4]), rows_of([7, 8])),
        ("ads", 1): TableShare().extended(np.array([2]), np.array([0]), rows_of([2])),
        ("ads", 2): TableShare().extended(NONE, NONE, rows_of([])),
    }
    values, found = LocalState({"ads": 1, "users": 1}, shares).lookup("ads", np.array([2, 1, 3, 2]))
    assert values[:, 0].tolist() == [2, 1, 0, 2]
    assert found.tolist() == [True, True, False, True]


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'ads'.*It has 'ads'"):
        check_table("a reader", "add", {"ads": 1})
    with pytest.raises(ConfigError, match="no such table"):
        check_table("a reader", 7, {})
