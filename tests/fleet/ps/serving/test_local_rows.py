from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from fleet.errors import CheckpointError, ConfigError
from fleet.ps.publishing.delta import decode, encode
from fleet.ps.serving.local_rows import (
    GONE,
    MISSING,
    LocalState,
    MappedRows,
    RowIndex,
    TableShare,
    check_table,
    map_file,
    merged,
)
from fleet.ps.table.hash import mix

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


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_rows_at_any_address(tmp_path: Path, encoding: str) -> None:
    values = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    stored, scales = encode(values, encoding)
    (tmp_path / "rows").write_bytes(b"\1\2\3" + stored.tobytes())
    octets = map_file(tmp_path / "rows")
    (tmp_path / "rows").unlink()
    mapped = MappedRows(octets, 5, encoding, scales)
    chosen = np.array([19, 0, 7, 7])
    rows = mapped.rows(3 + chosen * 5 * stored.itemsize)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, decode(stored, scales)[chosen])
    assert mapped.rows(np.empty(0, np.int64)).shape == (0, 5)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert len(map_file(tmp_path / "empty")) == 0
    assert MappedRows(map_file(tmp_path / "empty"), 4).rows(np.empty(0, np.int64)).shape == (0, 4)
    with pytest.raises(CheckpointError, match="symbolic link"):
        map_file(tmp_path / "link")
    with pytest.raises(CheckpointError, match="No such file"):
        map_file(tmp_path / "absent")


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
