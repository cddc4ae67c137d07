from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from fleet.ps.serving.row_index import GONE, MISSING, RowIndex, merged
from fleet.ps.table.hash import mix

KEYS = arrays.arrays(np.int64, st.integers(0, 60), elements=st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=60, deadline=None)
@given(KEYS, KEYS)
def test_finds_what_a_dictionary_finds(keys: np.ndarray, asked: np.ndarray) -> None:
    known = {key: place for place, key in reversed(list(enumerate(keys.tolist())))}
    index = RowIndex(keys, np.arange(len(keys)))
    for ids in (asked, keys):
        assert index.find(ids, mix(ids)).tolist() == [known.get(key, MISSING) for key in ids.tolist()]
    assert len(index) == len(known)


@settings(max_examples=40, deadline=None)
@given(KEYS, KEYS)
def test_the_newer_place_counts(newer: np.ndarray, older: np.ndarray) -> None:
    both = merged(RowIndex(newer, np.full(len(newer), GONE)), RowIndex(older, np.arange(len(older))))
    ids = np.concatenate([newer, older])
    places = both.find(ids, mix(ids))
    assert (places[: len(newer)] == GONE).all()
    first = RowIndex(older, np.arange(len(older))).find(older, mix(older))
    kept = ~np.isin(older, newer)
    assert places[len(newer) :][kept].tolist() == first[kept].tolist()


@pytest.mark.parametrize("n", [1, 2, 1000, 100_000])
def test_buckets_hold_about_one_id(n: int) -> None:
    keys = np.arange(n) * 2**20
    index = RowIndex(keys, keys)
    assert np.array_equal(index.find(keys, mix(keys)), keys)
    assert np.diff(index._starts.astype(np.int64)).max() <= 16
