"""Files in folders that others may write too: no call follows a link, waits for a FIFO, or trusts another's file."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.common import plain_files
from fleet.common.plain_files import (
    NotPlainError,
    check_owner,
    create,
    open_own,
    open_to_read,
    read_small,
    remove_stale,
    replace_file,
    replacing,
)

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def append(path: Path) -> None:
    os.close(open_own(path, os.O_WRONLY | os.O_APPEND))


def empty(path: Path) -> None:
    os.close(open_own(path, os.O_WRONLY | os.O_TRUNC))


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo"])
@pytest.mark.parametrize("call", [open_to_read, append, empty, create])
def test_nothing_is_followed_or_waited_for(tmp_path: Path, call: Callable[[Path], object], kind: str) -> None:
    precious, path = tmp_path / "precious", tmp_path / "log"
    precious.write_text("precious")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(precious if kind == "link" else tmp_path / "new")
    with pytest.raises(OSError, match="File exists|a symbolic link, which may lead anywhere|not a regular file"):
        call(path)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_a_file_is_replaced_at_once_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)
    replace_file(path, b"own", 0o600, is_durable=False)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"own", 0o600)


def test_after_an_error_the_old_file_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace_file(path, "old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state"]


def test_a_link_of_this_user_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "newest").symlink_to("run-7")
    replace_file(tmp_path / "newest", "7")
    assert (tmp_path / "newest").is_symlink()
    assert (tmp_path / "run-7").read_text() == "7"
    assert read_small(tmp_path / "newest", 10) == b"7"


@pytest.mark.parametrize("at", ["folder", "fifo"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, at: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="Is a directory|neither a regular file"):
        replace_file(tmp_path / at, "7")
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder"]


@needs_root
def test_links_and_files_of_another_user_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("precious")
    (tmp_path / "log").touch()
    for name in ("link", "log"):
        os.chown(tmp_path / name, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(NotPlainError, match=f"a symbolic link of user {STRANGER}, .*this process is user 0"):
        replace_file(tmp_path / "link", "7")
    with pytest.raises(NotPlainError, match=f"the file belongs to user {STRANGER}"):
        append(tmp_path / "log")
    assert not (tmp_path / "precious").exists()


@needs_root
def test_root_works_in_the_folder_of_a_user(tmp_path: Path) -> None:
    """A container: the folder, and what an earlier run has left there, belong to the user of the host."""
    (tmp_path / "log").touch()
    for path in (tmp_path, tmp_path / "log"):
        os.chown(path, STRANGER, STRANGER)
    append(tmp_path / "log")
    replace_file(tmp_path / "log", "7")
    with pytest.raises(NotPlainError, match=f"the folder belongs to user {STRANGER}"):
        check_owner(tmp_path)


def test_a_file_system_with_other_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a file that this process makes is this user, whatever the number."""
    append(tmp_path / "log")
    monkeypatch.setattr(plain_files.os, "geteuid", lambda: 4711)
    append(tmp_path / "log")
    check_owner(tmp_path)


def test_only_so_much_is_read(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("12345")
    assert read_small(tmp_path / "text", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_small(tmp_path / "text", 4)


def test_what_the_dead_have_left_goes(tmp_path: Path) -> None:
    for name in (".state.0123.tmp", ".state.4567.tmp", ".other.0123.tmp", "state"):
        (tmp_path / name).touch()
    for name in (".state.0123.tmp", ".other.0123.tmp"):
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    remove_stale(tmp_path / "state")
    assert sorted(os.listdir(tmp_path)) == [".other.0123.tmp", ".state.4567.tmp", "state"]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
