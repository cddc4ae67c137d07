"""Jobs of processes: versions stay exact through kills, and reader processes go back to one within a second."""

from __future__ import annotations

import json
import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet import fleet, ps
from tests.helpers.ps_fault_job import IDS, FaultJob, Kill, Training, expected_tables

LIMIT_S = 60.0


def after(step: int) -> np.ndarray:
    """Returns the rows of all ids after ``step`` steps of two workers."""
    rows: np.ndarray = expected_tables(2, step, mean=True)["ads"].numpy()
    return rows


def mark_every(steps: int, rank: int, step: int) -> None:
    if step % steps == 0:
        fleet.mark_version(f"step-{step}", keep=4)


def job_of(folder: Path, steps: int, after_step: Any, num_servers: int = 2) -> FaultJob:
    training = Training(
        configs={"publish": str(folder / "rows"), "publish_every_s": 0.01, "publish_values": "float32"},
        after_step=after_step,
    )
    return FaultJob(folder / "job", "sync", num_servers=num_servers, num_workers=2, steps=steps, training=training)


@pytest.mark.slow
def test_versions_are_exact_though_servers_and_workers_are_killed_while_they_are_marked(tmp_path: Path) -> None:
    every, steps = 8, 64
    # Both workers have done the steps of a mark: the kill comes while it is made, or just after.
    kills = [Kill(2 * every * k, ("server-0", "worker-1", "server-1", "worker-0")[k % 4]) for k in range(1, 7)]
    job_of(tmp_path, steps, partial(mark_every, every)).run(kills)
    versions = ps.Reader(tmp_path / "rows").versions
    assert [version.name for version in versions] == [f"step-{step}" for step in (40, 48, 56, 64)]
    for version in versions:
        assert version.name == f"step-{version.step}"
        with ps.Reader(tmp_path / "rows", version=version.name) as reader:
            assert np.array_equal(reader.lookup("ads", IDS), after(version.step)), version.name
    assert sorted(path.name for path in (tmp_path / "rows" / "versions").iterdir()) == sorted(
        version.name for version in versions
    )


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"{[path.name for path in paths if not path.exists()]} did not come"
        time.sleep(0.005)


def watch(rows: Path, folder: Path, number: int, good_step: int) -> None:
    """Looks up rows all the time; notes when they first were the version's, and every lookup after it that is not."""
    good = after(good_step)
    went_back_at = 0.0
    before, later, leaks = 0, 0, 0
    wait_for(rows / "MANIFEST.json")
    with ps.Reader(rows).follow(0.5) as reader:
        (folder / f"ready-{number}").touch()
        while not (folder / "stop").exists():
            is_back = reader.version is not None
            found = np.array_equal(reader.lookup("ads", IDS), good)
            if is_back and not went_back_at:
                went_back_at = time.time()
                (folder / f"back-{number}").touch()
            before += not is_back
            later += is_back
            leaks += is_back and not found
    (folder / f"seen-{number}.json").write_text(
        json.dumps({"went_back_at": went_back_at, "before": before, "later": later, "leaks": leaks})
    )


def brake(folder: Path, good_step: int, bad_step: int, rank: int, step: int) -> None:
    """Marks, pulls the brake when the readers are there, and trains on when they are back."""
    mark_every(good_step, rank, step)
    if rank == 0 and step == bad_step:
        wait_for(*(folder / f"ready-{number}" for number in range(3)))
        (folder / "braked").write_text(repr(time.time()))
        ps.roll_back(folder / "rows", f"step-{good_step}")
        wait_for(*(folder / f"back-{number}" for number in range(3)))


@pytest.mark.slow
def test_three_reader_processes_are_back_within_a_second_and_nothing_newer_leaks(tmp_path: Path) -> None:
    good_step, bad_step, steps = 20, 30, 80
    context = multiprocessing.get_context("forkserver")
    job = job_of(tmp_path, steps, partial(brake, tmp_path, good_step, bad_step), num_servers=1)
    readers = [
        context.Process(target=watch, args=(tmp_path / "rows", tmp_path, number, good_step), daemon=True)
        for number in range(3)
    ]
    try:
        for process in readers:
            process.start()
        job.run([])
        (tmp_path / "stop").touch()
        for process in readers:
            process.join(LIMIT_S)
        assert [process.exitcode for process in readers] == [0, 0, 0]
    finally:
        for process in readers:
            process.kill()
            process.join()
    seen = [json.loads((tmp_path / f"seen-{number}.json").read_text()) for number in range(3)]
    braked_at = float((tmp_path / "braked").read_text())
    print("seconds until each reader was back:", [round(one["went_back_at"] - braked_at, 3) for one in seen], seen)
    for one in seen:
        assert one["before"] > 0
        assert one["leaks"] == 0
        assert one["later"] > 20
        assert 0 < one["went_back_at"] - braked_at < 1
    # Training and publishing went on; released readers see its rows.
    reader = ps.Reader(tmp_path / "rows")
    assert np.array_equal(reader.lookup("ads", IDS), after(good_step))
    ps.release(tmp_path / "rows")
    reader.refresh()
    assert np.array_equal(reader.lookup("ads", IDS), after(steps))
