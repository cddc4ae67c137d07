"""Add (geo) and contains, in batches of every size of span."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.ps import Accessor, Initializer, Rule, SparseTable, SparseTableConfig
from fleet.ps.table.kernels import row_requests
from tests.fleet.ps.reference_store import table_of


@pytest.mark.parametrize("n", [1, 63, 4096, 4097, 30_000])
def test_add_and_contains(n: int) -> None:
    """Small batches hold eight sub-shards at a time, large ones one; both reach every key once."""
    config = SparseTableConfig("t", 3, Rule("sgd"), initializer=Initializer("constant", 0.25))
    table = SparseTable(config)
    keys = np.random.default_rng(n).permutation(2 * n) - n
    present = keys[:n]
    table.pull(present)
    deltas = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
    table.add(present, deltas)
    np.testing.assert_array_equal(table.pull(present, create=False), deltas + np.float32(0.25))
    assert table.contains(keys).tolist() == [True] * n + [False] * n
    assert row_requests.contains.signatures, "the kernels did it"


def test_add_reaches_columns_that_did_not_exist() -> None:
    """Geo: what was pulled as zeros becomes the delta, and counts as present from then on."""
    config = SparseTableConfig("t", 3, Rule("sgd"), accessor=Accessor(embedx_threshold=100))
    table, key = SparseTable(config), np.array([5])
    table.pull(key)
    table.add(key, np.array([[1, 2, 3]], np.float32))
    assert table.pull(key).tolist() == [[1, 2, 3]]
    assert next(iter(table.blocks())).has_embedx.tolist() == [True]


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "twins"])
def test_columns_that_an_add_creates_have_the_state_of_the_rule(use_kernels: bool) -> None:
    """D.5: the rows of an nn.Embedding come by add, and their accumulators begin where the optimizer says."""
    rule = Rule("adagrad", {"learning_rate": 1.0, "initial_accumulator": 3.0})
    config = SparseTableConfig("t", 2, rule, accessor=Accessor(embedx_threshold=100))
    table, key = table_of(config, use_kernels), np.array([5])
    table.add(key, np.array([[4, 4]], np.float32))
    table.push(key, np.ones((1, 2), np.float32))
    np.testing.assert_allclose(table.pull(key), [[3.5, 3.5]])
