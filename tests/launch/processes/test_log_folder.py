"""The files of the log folder belong to one job; nothing of the user's is touched."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fleet.errors import LaunchError
from fleet.launch.processes.log_folder import own_log_folder
from tests.launch.launcher import Launcher

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
def test_the_profile_of_an_earlier_job_goes_where_its_logs_go(tmp_path: Path, keep: bool) -> None:
    own = {"trace.json", "table.txt", "rank0.steps.json", "rank3.trace.json"}
    for folder in (tmp_path, tmp_path / "profile"):
        folder.mkdir(exist_ok=True)
        for name in ("trace.json", "table.txt", "mine.txt"):
            (folder / name).touch()
    for name in own:
        (tmp_path / "profile" / name).touch()
    with own_log_folder(tmp_path, keep=keep):
        assert names(tmp_path) == {"trace.json", "table.txt", "mine.txt"}, "these are the user's"
        assert names(tmp_path / "profile") == {"mine.txt"}
    if keep:
        assert names(tmp_path / "previous" / "profile") == own
        (tmp_path / "workerlog.1").touch()
        with own_log_folder(tmp_path, keep=True):
            assert names(tmp_path / "previous" / "profile") == set(), "the job before had none"


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [(".launchers", "link"), ("endpoints.log", "link"), ("workerlog.1", "fifo"), ("workerlog.1", "fifo that is read")],
)
def test_what_others_have_put_there_is_neither_written_nor_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "log" / name
    victim.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "fifo that is read" else -1
    script = "open('started', 'w')"
    with Launcher(tmp_path, script, "--nproc_per_node=2", "--log_dir=log") as launcher:
        assert launcher.wait() == 1
        assert f"{path.name} is a link, a FIFO or the like" in launcher.stderr
        assert "Traceback" not in launcher.stderr
        assert not (tmp_path / "started").exists()
    if reader >= 0:
        os.close(reader)
    assert victim.read_text() == "precious"


def test_a_link_named_previous_is_refused_and_one_that_is_the_folder_is_not(tmp_path: Path) -> None:
    elsewhere, log = tmp_path / "elsewhere", tmp_path / "log"
    fill(elsewhere)
    fill(tmp_path / "real")
    log.symlink_to(tmp_path / "real")
    (log / "previous").symlink_to(elsewhere)
    with pytest.raises(LaunchError, match="previous is a link"), own_log_folder(log, keep=True):
        pass
    assert names(elsewhere) == {*OLD, *USERS}
    (log / "previous").unlink()
    with own_log_folder(log, keep=True):
        assert names(log / "previous") == {*OLD}
