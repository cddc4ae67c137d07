"""The files of the log folder belong to one job; nothing of the user's is touched."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from fleet.launch._log_folder import own_log_folder

OLD = {
    "workerlog.0": "w",
    "serverlog.12": "s",
    "envlog.0": "e",
    "backup_env.server.0.json": "b",
    "endpoints.log": "e",
    "job.gpu.log": "g",
    "job.abcdef.log": "LAUNCH INFO x",
}
USERS = {"mine.output.log": "mine", "workerlog.txt": "mine", "notes.log": "mine"}


def fill(folder: Path, text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**OLD, **USERS}.items():
        (folder / name).write_text(content + text)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}


@pytest.mark.parametrize("keep", [True, False])
def test_what_an_earlier_job_left_is_moved_or_removed(tmp_path: Path, keep: bool) -> None:
    fill(tmp_path)
    (tmp_path / "workerlog.7").symlink_to(tmp_path / "notes.log")
    with own_log_folder(tmp_path, keep=keep):
        assert names(tmp_path) == {*USERS, "workerlog.7"}
    assert (tmp_path / "previous").exists() == keep
    if keep:
        assert names(tmp_path / "previous") == {*OLD}
        (tmp_path / "previous" / "kept.txt").touch()
        (tmp_path / "workerlog.1").touch()
        with own_log_folder(tmp_path, keep=True):
            assert names(tmp_path / "previous") == {"workerlog.1", "kept.txt"}, "one job, and what is not a job's"


def test_a_folder_that_another_launcher_uses_is_left_as_it_is(tmp_path: Path) -> None:
    with own_log_folder(tmp_path / "log", keep=True):
        fill(tmp_path / "log")
        for keep in (True, False):
            with own_log_folder(tmp_path / "log", keep=keep):
                assert names(tmp_path / "log") == {*OLD, *USERS}
    with own_log_folder(tmp_path / "log", keep=True):
        assert names(tmp_path / "log") == {*USERS}


def test_without_locks_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with own_log_folder(tmp_path, keep=True):
        assert names(tmp_path) == {*OLD, *USERS}
