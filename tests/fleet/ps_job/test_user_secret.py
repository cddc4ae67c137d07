"""The secret of jobs that are started by hand on one machine: its user's alone (issue 10, High 3)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.ps_job import user_secret
from fleet.ps_job.user_secret import NAME, read_user_secret
from tests.fleet.ps.service import in_threads


def read(folder: Path) -> bytes:
    return read_user_secret(Environment({"FLEET_SECRET_FOLDER": str(folder)}))


def test_the_first_process_makes_it_and_the_others_find_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        secret = read(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert len(secret) == 64
    assert read(tmp_path / "a" / "b") == secret
    assert read(tmp_path / "other") != secret
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / NAME).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "a" / "b") == [NAME]


def test_all_that_start_at_once_have_the_same(tmp_path: Path) -> None:
    found: list[bytes] = []
    ready = threading.Barrier(8)

    def process() -> None:
        ready.wait(10)
        found.append(read(tmp_path / "s"))

    in_threads(*[process] * 8)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path / "s") == [NAME]


def test_by_default_it_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_user_secret(Environment({})) == read(tmp_path / ".fleet")


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("open folder", "chmod 700"),
        ("open file", "chmod 600"),
        ("folder of another user", "must be yours alone"),
        ("link to a folder", "cannot be kept"),
        ("link to a file", "cannot be kept"),
        ("pipe", "holds no secret"),
        ("empty file", "holds no secret"),
        ("file as folder", "cannot be kept"),
    ],
)
def test_what_others_could_read_or_have_put_there_is_refused(
    what: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    secret = read(elsewhere)
    if what == "link to a folder":
        folder.symlink_to(elsewhere)
    elif what == "file as folder":
        folder.write_text("x")
    else:
        folder.mkdir(0o700)
    if what == "link to a file":
        (folder / NAME).symlink_to(elsewhere / NAME)
    elif what == "pipe":
        os.mkfifo(folder / NAME, 0o600)
    elif what in ("open file", "empty file", "open folder"):
        (folder / NAME).write_bytes(b"" if what == "empty file" else secret)
        (folder / NAME).chmod(0o640 if what == "open file" else 0o600)
    if what == "open folder":
        folder.chmod(0o755)
    if what == "folder of another user":
        monkeypatch.setattr(user_secret.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=rule):
        read(folder)
