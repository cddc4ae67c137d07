from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.ps import (
    Accessor,
    CountFilterEntry,
    DenseTable,
    DenseTableConfig,
    Rule,
    SparseTableConfig,
    export_text,
    save_dense,
    save_table,
)
from fleet.ps.serving.saved_rows import SavedRows, is_save
from fleet.ps.table.partition import servers_of_keys
from tests.fleet.ps.reference_store import ReferenceTable

IDS = np.arange(-200, 200)
ADAM = Rule("adam", {"learning_rate": 0.1})


def filled(config: SparseTableConfig, ids: np.ndarray = IDS, seed: int = 0) -> ReferenceTable:
    table = ReferenceTable(config)
    random = np.random.default_rng(seed)
    ones = np.ones(len(ids), np.float32)
    counts = (ones * 3, ones) if config.accessor is not None else ()
    for _ in range(2):
        table.push(ids, random.normal(size=(len(ids), table.layout.num_weights)).astype(np.float32), *counts)
    table.push(ids[::2], random.normal(size=(len(ids[::2]), table.layout.num_weights)).astype(np.float32), *(
        count[::2] for count in counts
    ))  # fmt: skip
    return table


@pytest.mark.parametrize(
    "config",
    [
        SparseTableConfig("ads", 4, Rule("sgd", {"learning_rate": 0.1})),
        SparseTableConfig("an/ads table.", 1, ADAM, entry=CountFilterEntry(3)),
        SparseTableConfig("ads", 5, ADAM, accessor=Accessor()),
        SparseTableConfig("ads", 6, Rule("adagrad"), accessor=Accessor("DownpourCtrAccessor")),
    ],
    ids=["plain", "admitted", "accessor", "counters"],
)
def test_a_save_reads_as_a_pull_does(tmp_path: Path, config: SparseTableConfig) -> None:
    shares = [IDS[servers_of_keys(IDS, 3) == server] for server in range(3)]
    tables = [filled(config, share) for share in shares]
    for server, table in enumerate(tables):
        save_table(table, tmp_path, server=server, num_servers=3, save_id="one")
    assert is_save(tmp_path)
    saved = SavedRows(tmp_path)
    assert saved.refresh()
    ids = np.arange(-250, 250)
    rows, found = saved.state.lookup(config.name, ids)
    owners = servers_of_keys(ids, 3)
    pulled = np.array([tables[owner].pull(ids[i : i + 1], create=False)[0] for i, owner in enumerate(owners)])
    assert rows.tobytes() == pulled.tobytes()
    pushed_three_times = {key for share in shares for key in share[::2].tolist()}
    assert set(ids[found].tolist()) == (pushed_three_times if config.entry else set(IDS.tolist()))
    assert {server: position.history for server, position in saved.state.positions.items()} == dict.fromkeys(
        range(3), "one"
    )


def test_a_newer_save_is_taken_up_whole(tmp_path: Path) -> None:
    config = SparseTableConfig("ads", 2, Rule("sgd"))
    tables = [filled(config, seed=seed) for seed in range(2)]
    save_table(tables[0], tmp_path, save_id="one")
    saved = SavedRows(tmp_path)
    assert saved.refresh()
    assert not saved.refresh()
    before = saved.state
    save_table(tables[1], tmp_path, save_id="two")
    assert np.array_equal(before.lookup("ads", IDS)[0], tables[0].pull(IDS, create=False))  # its file is gone by now
    assert saved.refresh()
    assert np.array_equal(saved.state.lookup("ads", IDS)[0], tables[1].pull(IDS, create=False))
    save_table(tables[0], tmp_path, server=0, num_servers=2, save_id="three")  # server 1 has not written its part yet
    with pytest.raises(CheckpointError, match=r"not complete|different saves"):
        saved.refresh()
    assert np.array_equal(saved.state.lookup("ads", IDS)[0], tables[1].pull(IDS, create=False))


def test_saves_that_cannot_be_looked_up(tmp_path: Path) -> None:
    scored = filled(SparseTableConfig("ads", 5, Rule("sgd"), accessor=Accessor()))
    save_table(scored, tmp_path / "delta", mode=1)
    with pytest.raises(CheckpointError, match="mode 1, which holds only the rows that changed"):
        SavedRows(tmp_path / "delta").refresh()
    export_text(filled(SparseTableConfig("ads", 2, Rule("sgd"))), tmp_path / "text")
    with pytest.raises(CheckpointError, match="a save as text.*text=False"):
        SavedRows(tmp_path / "text").refresh()
    save_dense(DenseTable(DenseTableConfig("mlp", 5, Rule("sgd"))), tmp_path / "dense")
    with pytest.raises(CheckpointError, match="dense tables only"):
        SavedRows(tmp_path / "dense").refresh()
    assert not is_save(tmp_path)


def test_a_damaged_row_file(tmp_path: Path) -> None:
    path = save_table(filled(SparseTableConfig("ads", 2, Rule("sgd"))), tmp_path).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        SavedRows(tmp_path).refresh()
    path.write_bytes(data[:-9])
    with pytest.raises(CheckpointError, match="manifest says"):
        SavedRows(tmp_path).refresh()
