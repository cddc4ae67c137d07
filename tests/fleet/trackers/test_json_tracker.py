"""JsonTracker: lines that any reader of JSON takes, without steps twice after a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fleet.trackers.json_tracker import JsonTracker
from fleet.trackers.tracker import RunInfo


def write(folder: Path, steps: range, first: int | None = None) -> list[dict[str, Any]]:
    """Logs ``steps`` as one process does; returns what is there afterwards."""
    tracker = JsonTracker()
    tracker.start(RunInfo(name="run", project="p", folder=folder, resumed=first is not None, first_step=first))
    for step in steps:
        tracker.log({"loss": step / 3, "nan": math.nan}, step)
    tracker.close()
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


def test_lines(tmp_path: Path) -> None:
    (line,) = write(tmp_path, range(1, 2))
    assert (line["step"], line["loss"], line["nan"]) == (1, 1 / 3, None)
    assert line["time"] > 1e9


def test_steps_that_are_trained_again_stand_once(tmp_path: Path) -> None:
    write(tmp_path, range(8))
    with (tmp_path / "run.jsonl").open("a", errors="surrogatepass") as file:
        file.write(f"{'[' * 200_000}\n7\n\ud800\n")  # damaged
        file.write('{"step": 8, "lo')  # killed while it wrote
    assert [line["step"] for line in write(tmp_path, range(5, 10), first=5)] == list(range(10))


def test_without_a_first_step_everything_stays(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    assert [line["step"] for line in write(tmp_path, range(2))] == [0, 1, 2, 0, 1]
