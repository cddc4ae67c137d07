"""Increments: each continues the save before it, and brings what was deleted since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.ps import Accessor, Rule, SparseTable, SparseTableConfig, load_table, save_table
from fleet.ps.files import table_files
from fleet.ps.table import save_chain
from fleet.ps.table.save_chain import SaveChain

CONFIG = SparseTableConfig("t", 2, Rule("sgd"), accessor=Accessor(delta_threshold=0.05, base_threshold=0.0))


def push(table: SparseTable, *keys: int) -> None:
    table.push(np.array(keys), np.ones((len(keys), 2), np.float32))


def trained(folder: Path, modes: str = "0111") -> SparseTable:
    """Saves a base and three increments; rows 3 and 4 are deleted before the last one, and row 4 comes back."""
    table = SparseTable(CONFIG)
    for number, (keys, mode) in enumerate(zip(((0, 1, 2, 3, 4), (0, 1), (1, 2), (1, 4)), modes, strict=True)):
        if number == 3:
            table.erase(np.array([3, 4]))
        push(table, *keys)
        save_table(table, folder / str(number), mode=int(mode))
    return table


def rows(table: SparseTable) -> dict[int, list[float]]:
    return {int(block.keys[i]): block.values[i].tolist() for block in table.blocks() for i in range(len(block))}


@pytest.mark.parametrize("modes", ["0111", "2111", "3111"])
def test_a_base_and_all_increments(modes: str, tmp_path: Path) -> None:
    """Issue 37, 1: row 3, which had been deleted, was back."""
    table, loaded = trained(tmp_path, modes), SparseTable(CONFIG)
    for number in range(4):
        load_table(loaded, tmp_path / str(number))
    assert rows(loaded) == rows(table)
    assert sorted(rows(loaded)) == [0, 1, 2, 4]


@pytest.mark.parametrize("base", [0, 2, 3])
@pytest.mark.parametrize("during", [0, 1, 2])
def test_what_is_deleted_while_a_save_is_written(
    base: int, during: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows were copied before, so the next increment must name them: no save knew that they had gone."""
    table, loaded = SparseTable(CONFIG), SparseTable(CONFIG)
    push(table, 1, 2, 3)
    whole = table_files._GroupWriter.finish

    def finish(writer: Any) -> Any:
        if number == during:
            table.erase(np.array([3]))
        return whole(writer)

    monkeypatch.setattr(table_files._GroupWriter, "finish", finish)
    for number in range(4):
        push(table, 1, 3) if number < during else push(table, 1)
        save_table(table, tmp_path / str(number), mode=1 if number else base)
        load_table(loaded, tmp_path / str(number))
    assert rows(loaded) == rows(table)
    assert 3 not in rows(table)


@pytest.mark.parametrize("order", ["02", "021", "013", "1", "0112", "0123-0"])
def test_gaps_and_swaps_are_refused(order: str, tmp_path: Path) -> None:
    """Issue 37, 1: rows of an older state came without a word; a base may be loaded at any time."""
    trained(tmp_path)
    loaded = SparseTable(CONFIG)
    if order.endswith("-0"):
        for number in (*order[:4], "0", "1"):
            load_table(loaded, tmp_path / number)
        return
    for number in order[:-1]:
        if order == "0112" and loaded.chain.saves == [] and number == "1":
            continue
        before = rows(loaded)
        try:
            load_table(loaded, tmp_path / number)
        except CheckpointError:
            assert rows(loaded) == before
            return
    before = rows(loaded)
    with pytest.raises(CheckpointError, match=r"is an increment \(mode 1\) that continues .* in the order in which"):
        load_table(loaded, tmp_path / order[-1])
    assert rows(loaded) == before


def test_a_whole_save_between_increments_may_take_their_place(tmp_path: Path) -> None:
    table = trained(tmp_path)
    save_table(table, tmp_path / "whole")
    push(table, 2)
    save_table(table, tmp_path / "last", mode=1)
    for first in (["whole"], ["0", "1", "2", "3"]):
        loaded = SparseTable(CONFIG)
        for name in (*first, "last"):
            load_table(loaded, tmp_path / name)
        assert rows(loaded) == rows(table)


def test_damaged_ids_of_deleted_rows(tmp_path: Path) -> None:
    trained(tmp_path)
    (path,) = (tmp_path / "3" / "t").glob("*.rows")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    loaded = SparseTable(CONFIG)
    for number in range(3):
        load_table(loaded, tmp_path / str(number))
    with pytest.raises(CheckpointError, match="the checksum of its deleted ids is wrong"):
        load_table(loaded, tmp_path / "3")


def test_too_many_deletions_need_a_new_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_chain, "MOST_DELETED", 10)
    chain = SaveChain()
    chain.note_deleted(np.arange(20))
    assert not len(chain.deleted), "nothing continues yet"
    chain.begin(["base"])
    for _ in range(5):
        chain.note_deleted(np.arange(4))
    assert chain.deleted.tolist() == [0, 1, 2, 3]
    assert chain.saves == ["base"]
    chain.note_deleted(np.arange(100, 120))
    assert chain.saves == []
