"""QueueDataset: streams files once, cuts batches across files, leaves no thread and no program."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fleet.dataset import source
from fleet.dataset.base import DatasetBase
from fleet.dataset.queue import QueueDataset
from fleet.errors import ConfigError
from tests.fleet.dataset.files import SLOTS, write_files


def made(files: list[str], **options: Any) -> QueueDataset:
    """Returns a dataset with these files."""
    dataset = QueueDataset()
    dataset.init(use_var=SLOTS, **options)
    dataset.set_filelist(files)
    return dataset


def labels(dataset: QueueDataset) -> list[list[int]]:
    """Returns the labels of each batch."""
    return [batch["label"].flatten().tolist() for batch in dataset]  # type: ignore[union-attr]


def test_batches_go_on_across_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B.7: streaming, one pass."""
    monkeypatch.setattr(source, "_BLOCK_BYTES", 64)
    dataset = made(write_files(tmp_path, [5, 0, 7]), batch_size=5)
    assert labels(dataset) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert labels(dataset) == labels(dataset)
    assert labels(made([])) == []


def test_a_loop_ends_with_the_pass_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    """002-26: no EOFException and no reader.reset(): each loop is a pass, also after one that was left early."""
    dataset = made(write_files(tmp_path, [4, 3]), batch_size=2)
    passes = [labels(dataset) for _ in range(3)]
    assert passes == [[[0, 1], [2, 3], [4, 5], [6]]] * 3
    for batch in dataset:
        assert batch["label"].flatten().tolist() == [0, 1]
        break
    assert labels(dataset) == passes[0]


def test_several_threads_bring_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BLOCK_BYTES", 64)
    dataset = made(write_files(tmp_path, [30, 20, 25, 1]), batch_size=8, thread_num=3)
    batches = labels(dataset)
    assert sorted(label for batch in batches for label in batch) == list(range(76))
    assert [len(batch) for batch in batches] == [8] * 9 + [4]


def test_each_file_goes_through_its_own_program(tmp_path: Path) -> None:
    """B.7: pipe_command, spawned per file."""
    dataset = made(write_files(tmp_path, [3, 3]), batch_size=9, pipe_command="head -n 2 | cat")
    assert labels(dataset) == [[0, 1, 3, 4]]


def test_a_malformed_line_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BLOCK_BYTES", 64)
    files = write_files(tmp_path, [40, 40])
    with open(files[1], "a") as file:
        file.write("3 1 2\n")
    for threads in (1, 2):
        with pytest.raises(ConfigError, match=r"part-0-1, line 41: slot 'words'"):
            labels(made(files, thread_num=threads))


def test_a_reader_that_stops_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have ended, and the fixture of conftest looks for programs."""
    monkeypatch.setattr(source, "_BLOCK_BYTES", 64)
    before = threading.active_count()
    batches = iter(made(write_files(tmp_path, [500, 500]), thread_num=2, pipe_command="cat | cat"))
    next(batches)
    assert threading.active_count() > before
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_shuffles_are_not_for_streams() -> None:
    """B.7: NotImplementedError."""
    for call in (QueueDataset().local_shuffle, QueueDataset().global_shuffle):
        with pytest.raises(NotImplementedError, match="use InMemoryDataset"):
            call()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no slots"):
        next(iter(QueueDataset()))
    with pytest.raises(ConfigError, match="not a file here"):
        next(iter(made([str(tmp_path / "absent")])))
    with pytest.raises(ConfigError, match="takes a list of file names"):
        made("part-0")  # type: ignore[arg-type]
    assert not hasattr(DatasetBase(), "__iter__")
