"""What processes write is read as far as it has the form, and curves of steps trained again stand once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fleet.launch.page import page_folder
from fleet.launch.page.page_folder import CheckpointLooks, PageFolder, ServerRecord, WorkerRecord, newest_checkpoints
from tests.helpers.paged import worker_record


def test_the_newest_values_of_a_worker(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path)
    assert folder.worker(0) == WorkerRecord()
    worker_record(tmp_path, 0, 3, tmp_path, loss=0.5)
    assert folder.worker(0) == WorkerRecord(3, {"loss": 0.5}, tmp_path)
    worker_record(tmp_path, 0, 4, loss=0.25)
    os.utime(tmp_path / "worker.0.json", ns=(0, 1))  # the clock of a file system may be coarse
    assert folder.worker(0) == WorkerRecord(4, {"loss": 0.25})
    folder.since_ns = 2
    assert folder.worker(0) == WorkerRecord()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"step": "x", "values": 3}', '{"values": {"a": "b"}}', "[" * 9999]
)
def test_what_has_not_the_form_is_passed_over(text: str, tmp_path: Path) -> None:
    for name in ("worker.0.json", "server.0.0.json", "server.x.0.json", "curves.jsonl"):
        (tmp_path / name).write_text(f"{text}\n")
    folder = PageFolder(tmp_path)
    assert folder.worker(0) == WorkerRecord()
    assert (folder.servers(), folder.curves()) == ({}, {})


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('{"step": 3}')
    (tmp_path / "worker.0.json").symlink_to(tmp_path / "other")
    assert PageFolder(tmp_path).worker(0) == WorkerRecord()


def test_curves_grow_and_a_restart_replaces_what_it_trains_again(tmp_path: Path) -> None:
    folder, path = PageFolder(tmp_path), tmp_path / "curves.jsonl"
    lines = [f"{json.dumps({'step': step, 'values': {'loss': step / 2}})}\n" for step in range(5)]
    path.write_text("".join(lines))
    assert folder.curves() == {"loss": [(step, step / 2) for step in range(5)]}
    with path.open("a") as file:
        file.write('{"step": 3, "values": {"loss": 9')
    assert folder.curves()["loss"][-1] == (4, 2.0)
    with path.open("a") as file:
        file.write('.5, "lr": NaN}}\n')
    found = folder.curves()
    assert found["loss"] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 9.5)]
    assert [step for step, _ in found["lr"]] == [3]


def test_servers_by_index_and_shard(tmp_path: Path) -> None:
    for number in range(2):
        text = json.dumps({"tables": {"users": {"table_rows": number}}, "totals": {"changes": 2}})
        (tmp_path / f"server.1.{number}.json").write_text(text)
    records = [ServerRecord({"users": {"table_rows": float(number)}}, {"changes": 2.0}) for number in range(2)]
    assert PageFolder(tmp_path).servers() == {1: records}


def test_complete_checkpoints_newest_first(tmp_path: Path) -> None:
    for step, name in ((1, "index.json"), (2, "manifest.json"), (3, "part")):
        (tmp_path / f"step-{step:010d}").mkdir()
        (tmp_path / f"step-{step:010d}" / name).write_bytes(bytes(10 * step))
    found = newest_checkpoints(tmp_path)
    assert [(one.path.name[-1], one.num_bytes) for one in found] == [("2", 20), ("1", 10)]
    for path in ("absent", "a\0b", "\ud800"):
        assert newest_checkpoints(tmp_path / path) == []


def test_a_folder_that_does_not_answer_takes_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole" / "step-0000000001").mkdir(parents=True)
    (tmp_path / "whole" / "step-0000000001" / "index.json").write_text("{}")
    hung, usual = threading.Event(), os.listdir

    def listdir(path: Any = ".") -> Any:
        return (hung.wait(60) and []) if "stalled" in str(path) else usual(path)

    monkeypatch.setattr(os, "listdir", listdir)
    looks = CheckpointLooks()
    assert [one.path.name for one in looks.newest(tmp_path / "whole")] == ["step-0000000001"]
    monkeypatch.setattr(page_folder, "_ANSWER_S", 0.01)
    for number in (0, 0, 0, *range(20)):  # a program may name others without end
        with pytest.raises(TimeoutError, match=r"stalled \d+ has not answered within 0\.01 s"):
            looks.newest(tmp_path / f"stalled {number}")
    threads = [thread for thread in threading.enumerate() if thread.name == "page checkpoints"]
    assert len(threads) == 8
    hung.set()
    for thread in threads:
        thread.join(60)
    monkeypatch.setattr(page_folder, "_ANSWER_S", 60.0)
    assert looks.newest(tmp_path / "stalled 0") == []
