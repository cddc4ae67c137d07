"""A file is there whole or not at all, in a local folder and in an object store, and an error says what to do."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fsspec
import pytest

from fleet.checkpoint.storage import LocalFolder, RemoteFolder, explained, is_remote, open_folder
from fleet.errors import CheckpointError, ConfigError


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalFolder | RemoteFolder]:
    address = str(tmp_path / "run" / "inner") if request.param == "local" else "memory://storage-test/inner"
    yield open_folder(address)
    fsspec.filesystem("memory").store.clear()


def test_a_folder_that_is_absent_has_no_files(folder: LocalFolder | RemoteFolder) -> None:
    assert folder.names() == []
    folder.remove("absent")
    with pytest.raises(FileNotFoundError):
        folder.get("absent")
    with pytest.raises(CheckpointError, match=r"inner/absent: "):
        folder.open_ranges("absent")


def test_a_put_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        LocalFolder(tmp_path).put("a", b"1")
    assert list(tmp_path.iterdir()) == []


def test_what_is_put_is_what_is_got(folder: LocalFolder | RemoteFolder) -> None:
    folder.prepare()
    folder.prepare()
    folder.put("a", b"first")
    folder.put("a", b"second")
    with folder.create("b") as file:
        file.write(b"0123456789")
    assert sorted(folder.names()) == ["a", "b"]
    assert folder.get("a") == b"second"
    folder.remove("a")
    assert folder.names() == ["b"]


def test_ranges_of_a_file(folder: LocalFolder | RemoteFolder) -> None:
    folder.prepare()
    folder.put("b", bytes(range(100)))
    ranges = folder.open_ranges("b")
    assert ranges.num_bytes == 100
    for begin, end in ((0, 10), (3, 5), (50, 100), (60, 60), (0, 100)):
        assert bytes(ranges.range(begin, end)) == bytes(range(begin, end))
    ranges.close()


def test_a_write_that_fails_leaves_no_object() -> None:
    folder = RemoteFolder("memory://storage-test/broken")
    folder.prepare()

    def fails() -> None:
        with folder.create("b") as file:
            file.write(b"0123")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert folder.names() == []


def test_a_rename_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(tmp_path)
    folder.put("index.json", b"old")

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="full"):
        folder.put("index.json", b"new")
    assert folder.get("index.json") == b"old"
    monkeypatch.undo()
    folder.put("index.json", b"new")  # over the temporary file that was left
    assert folder.names() == ["index.json"]
    assert folder.get("index.json") == b"new"


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "index.json").symlink_to(tmp_path / "secret")
    folder = LocalFolder(tmp_path / "run")
    with pytest.raises(OSError, match="symbolic"):
        folder.get("index.json")
    with pytest.raises(FileExistsError), folder.create("index.json"):
        pass
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_an_object_that_shrinks_meanwhile_is_an_error() -> None:
    folder = RemoteFolder("memory://storage-test/shrinks")
    folder.put("b", bytes(100))
    ranges = folder.open_ranges("b")
    folder.put("b", bytes(50))
    with pytest.raises(CheckpointError, match="bytes 40 to 100 were asked for, and some are missing"):
        ranges.range(40, 100)
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("path", "remote"),
    [("run", False), ("/a/b", False), ("file:///a", False), ("s3://a/b", True), ("memory://a", True)],
)
def test_an_address_is_remote_where_it_names_a_store(path: str, remote: bool) -> None:
    assert is_remote(path) is remote


def test_paths_of_files_are_local(tmp_path: Path) -> None:
    assert open_folder(f"file://{tmp_path}/x").path == f"{tmp_path}/x"
    assert isinstance(open_folder(tmp_path), LocalFolder)


def test_an_unknown_store_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere://a' cannot be reached: .*nowhere"):
        open_folder("nowhere://a")
    monkeypatch.setitem(sys.modules, "fsspec", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pip install '\.\[remote\]'"):
        open_folder("s3://a/b")
    assert isinstance(fsspec, ModuleType)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "may not write"),
        (errno.ENOENT, "was removed"), (errno.EDQUOT, "quota"), (errno.EIO, "Input/output error"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_do(number: int, text: str) -> None:
    assert text in explained(OSError(number, os.strerror(number)))
    assert explained(OSError("odd")) == "odd"


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{tmp_path}")
    assert open_folder("~/run").path == f"{tmp_path}/run"
    assert open_folder(Path("~/run")).path == f"{tmp_path}/run"
