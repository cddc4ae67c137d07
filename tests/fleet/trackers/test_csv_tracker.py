"""CsvTracker: one table for any names, without steps twice after a restart."""

from __future__ import annotations

import csv
from pathlib import Path

from fleet.trackers.csv_tracker import CsvTracker
from fleet.trackers.tracker import RunInfo


def write(folder: Path, steps: range, first: int | None = None) -> list[dict[str, str]]:
    """Logs ``steps`` as one process does; returns the rows that are there afterwards."""
    tracker = CsvTracker()
    tracker.start(RunInfo(name="run", project="p", folder=folder, resumed=first is not None, first_step=first))
    for step in steps:
        tracker.log({"loss": step / 3, 'a "b", c': 2.0}, step)
    tracker.close()
    with (folder / "run.csv").open(newline="", errors="replace") as file:
        return list(csv.DictReader(file))


def test_rows(tmp_path: Path) -> None:
    rows = write(tmp_path, range(1, 3))
    assert [(row["step"], row["name"], float(row["value"])) for row in rows] == [
        ("1", "loss", 1 / 3), ("1", 'a "b", c', 2.0), ("2", "loss", 2 / 3), ("2", 'a "b", c', 2.0),
    ]  # fmt: skip


def test_damaged_rows_cost_no_others(tmp_path: Path) -> None:
    """Once such a row made the tracker fail at the start, and it got no more values."""
    write(tmp_path, range(3))
    with (tmp_path / "run.csv").open("ab") as file:
        file.write(
            b"\xb2,0,loss,1\n"
            + "\u00b2,0,loss,1\n".encode()
            + b"9" * 5000
            + b",0,loss,1\n\x00\xff\n2,0,\xff\xe2\x80\xa8,1\n"
        )
    rows = write(tmp_path, range(3, 5), first=3)
    assert [int(row["step"]) for row in rows if row["name"] == "loss"] == list(range(5))
    assert len(rows) == 11


def test_steps_that_are_trained_again_stand_once(tmp_path: Path) -> None:
    write(tmp_path, range(8))
    rows = write(tmp_path, range(5, 10), first=5)
    assert [int(row["step"]) for row in rows if row["name"] == "loss"] == list(range(10))
