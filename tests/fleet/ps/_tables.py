"""What the tests of the tables share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.ps import SparseTable
from fleet.ps.embeddings.lookup import RowLookup
from fleet.ps.table.hash import MIX_1, MIX_2

DATA = Path(__file__).parents[2] / "data" / "ps"


def make_rows(table: SparseTable, keys: npt.ArrayLike) -> None:
    """Gives the keys rows with their initial weights, by adding zeros."""
    made = np.asarray(keys, np.int64)
    table.add(made, np.zeros((len(made), table.layout.num_weights), np.float32))


def make_asked_rows(lookup: RowLookup, call: Callable[[], object]) -> SparseTable:
    """Gives rows to the ids that ``call`` looks up in this process; returns their table."""
    call()  # makes the table
    source: Any = lookup.source
    pull = source.table.pull
    source.table.pull = lambda keys: (make_rows(source.table, keys), pull(keys))[1]
    call()
    source.table.pull = pull
    table: SparseTable = source.table
    return table


def rows_of(table: SparseTable, rows_per_window: int = 300) -> dict[int, tuple[Any, ...]]:
    """Everything the table knows, by key; fails if a walk meets a key twice."""
    found: dict[int, tuple[Any, ...]] = {}
    for block in table.blocks(rows_per_window):
        for i, key in enumerate(block.keys.tolist()):
            assert key not in found
            kept = block.statistics
            traffic = (
                ()
                if kept is None
                else (float(kept.shows[i]), float(kept.clicks[i]), float(kept.delta_scores[i]), int(kept.slots[i]))
            )
            admitted = bool(block.admitted[i])
            found[key] = (
                int(block.unseen_days[i]),
                int(block.counts[i]),
                admitted,
                admitted and bool(block.has_embedx[i]),
                tuple(block.values[i].tolist()),
                traffic,
                0 if block.ranks is None or not admitted else int(block.ranks[i]),
            )
    return found


def assert_same_rows(one: dict[int, tuple[Any, ...]], other: dict[int, tuple[Any, ...]], rtol: float = 2e-5) -> None:
    """Both hold the same keys, the same counts and flags, and numbers that agree."""
    assert one.keys() == other.keys()
    for key, row in one.items():
        assert (row[:4], row[6:]) == (other[key][:4], other[key][6:]), key
        np.testing.assert_allclose(row[4], other[key][4], rtol=rtol, atol=rtol / 20, err_msg=str(key))
        np.testing.assert_allclose(row[5], other[key][5], rtol=1e-6, err_msg=str(key))


def key_with_bits(bits: int) -> int:
    """The key whose mixed bits are ``bits``: lets a test choose sub-shard and place."""
    bits ^= bits >> 33
    bits = bits * pow(MIX_2, -1, 2**64) % 2**64
    bits ^= bits >> 33
    bits = bits * pow(MIX_1, -1, 2**64) % 2**64
    bits ^= bits >> 33
    return bits - 2**64 if bits >= 2**63 else bits
