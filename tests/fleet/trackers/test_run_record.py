"""RunRecord: each launch has a run of its own, a restart goes on with it."""

from __future__ import annotations

from pathlib import Path

from fleet.trackers.run_record import RunRecord


def test_names_of_runs(tmp_path: Path) -> None:
    def record(launch: str | None, goes_on: bool = False) -> tuple[str, bool]:
        found = RunRecord(tmp_path, "job", launch, goes_on)
        return found.name, found.resumed

    assert record(None, goes_on=True) == ("job", False)  # nothing to go on with here
    assert record(None) == ("job-2", False)
    assert record("a") == ("job-3", False)
    assert record("a") == ("job-3", True)
    assert record("b", goes_on=True) == ("job-3", True)
    assert record("a") == ("job-4", False)
    assert RunRecord(tmp_path, "other", "a", False).name == "other"


def test_own_steps_are_remembered(tmp_path: Path) -> None:
    first = RunRecord(tmp_path, "job", "a", False)
    assert not first.has_own_steps
    first.note_own_steps()
    assert RunRecord(tmp_path, "job", "a", False).has_own_steps
    assert not RunRecord(tmp_path, "job", "b", False).has_own_steps


def test_a_broken_file_begins_a_run(tmp_path: Path) -> None:
    (tmp_path / ".job.run").write_text("[1")
    assert (RunRecord(tmp_path, "job", "a", False).name) == "job-2"
