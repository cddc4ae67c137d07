from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps import Initializer, Reader, SparseTable, SparseTableConfig, save_table
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.serving import changes as changes_module
from fleet.ps.serving.changes import Changes, changes_between
from fleet.ps.serving.local_rows import LocalState
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain


def _check(chain: Chain, before: dict[int, np.ndarray], found: Changes) -> None:
    """Fails unless ``found`` is exactly how the rows of ``chain`` differ from ``before``."""
    changed = sorted(key for key, row in chain.rows.items() if key not in before or (row != before[key]).any())
    assert found.ids.tolist() == changed
    assert found.deleted.tolist() == sorted(before.keys() - chain.rows.keys())
    assert found.rows.tobytes() == b"".join(chain.rows[key].tobytes() for key in changed)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("fewest_rows", [150, 100_000])  # with and without a new base now and then
def test_changes_are_those_of_the_deltas(
    tmp_path: Path, servers: int, fewest_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "_BLOCK", 64)
    chain = Chain(FolderSink(tmp_path / "rows", "shop", "float32", fewest_rows=fewest_rows), servers)
    chain.write(150)
    reader = Reader(tmp_path / "rows")
    first = reader.changes("ads")
    _check(chain, {}, first)
    state = first.state
    for number in range(25):
        before = dict(chain.rows)
        for _ in range(1 + number % 3):
            chain.write(20, 10, whole=number == 15)
        reader.refresh()
        found = reader.changes("ads", state)
        _check(chain, before, found)
        assert not len(reader.changes("ads", found.state).ids)
        # The way back, to older rows.
        back = changes_between("ads", found.state, state)
        assert set(back.deleted.tolist()) == chain.rows.keys() - before.keys()
        assert set(back.ids.tolist()) == set(found.deleted.tolist()) | (set(found.ids.tolist()) & before.keys())
        state = found.state


def test_a_chain_that_goes_on_costs_what_it_adds(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path / "rows", "shop", "float32"))
    chain.write(700)
    reader = Reader(tmp_path / "rows")
    state = reader.changes("ads").state
    chain.write(10, 2)
    reader.refresh()
    asked = changes_module._candidates("ads", state, reader.changes("ads").state)
    assert len(asked) == 12


def test_a_row_of_nan_changes_once(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path / "rows", "shop", "float32", fewest_rows=0))
    keys = np.arange(3)
    chain.put(0, keys, np.full((3, DIM), np.nan, np.float32), keys[:0], whole=True)
    reader = Reader(tmp_path / "rows")
    state = reader.changes("ads").state
    chain.put(0, keys, np.full((3, DIM), np.nan, np.float32), keys[:0])
    reader.refresh()
    assert not len(reader.changes("ads", state).ids)


def test_a_save_that_is_replaced_is_compared(tmp_path: Path) -> None:
    table = SparseTable(SparseTableConfig("ads", DIM, initializer=Initializer("constant", 0.0)))
    table.add(IDS, np.ones((len(IDS), DIM), np.float32))
    save_table(table, tmp_path)
    reader = Reader(tmp_path)
    state = reader.changes("ads").state
    table.add(IDS[:2], np.ones((2, DIM), np.float32))
    table.add(np.array([10**15]), np.ones((1, DIM), np.float32))
    save_table(table, tmp_path)
    reader.refresh()
    found = reader.changes("ads", state)
    assert found.ids.tolist() == [*IDS[:2].tolist(), 10**15]
    assert found.rows[:, 0].tolist() == [2, 2, 1]
    assert not len(found.deleted)


def test_what_is_refused(tmp_path: Path) -> None:
    for dim in (DIM, DIM + 1):
        save_table(SparseTable(SparseTableConfig("ads", dim)), tmp_path / str(dim))
    reader = Reader(tmp_path / str(DIM))
    assert reader.changes("ads").rows.shape == (0, DIM)
    with pytest.raises(ConfigError, match=r"reader.changes\('add', ...\).*no such table.*Did you mean 'ads'"):
        reader.changes("add")
    with pytest.raises(ConfigError, match=r"reader.changes\(since=7\) takes the state of an earlier result, or None"):
        reader.changes("ads", 7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"rows have {DIM} columns now and had {DIM + 1} in since"):
        reader.changes("ads", Reader(tmp_path / str(DIM + 1)).changes("ads").state)
    assert not len(reader.changes("ads", LocalState()).ids)
    reader.close()
    with pytest.raises(ConfigError, match="is closed"):
        reader.changes("ads")
