"""LocalFS, and what fleet.utils.fs offers."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleet.utils.fs
from fleet.errors import UnsupportedOptionError
from fleet.utils.fs import AFSClient, FSFileExistsError, FSFileNotExistsError, LocalFS

FS = LocalFS()


def test_looking(tmp_path: Path) -> None:
    """B.8: names, not paths; a missing folder has no entries."""
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_text("")
    (tmp_path / "broken").symlink_to("nowhere")
    root = str(tmp_path)
    assert FS.ls_dir(root) == (["d"], ["broken", "f"])
    assert FS.list_dirs(root) == ["d"]
    assert FS.ls_dir(f"{root}/absent") == ([], [])
    assert FS.ls_dir(f"{root}/f") == ([], [])
    assert (FS.is_file(f"{root}/f"), FS.is_dir(f"{root}/d"), FS.is_exist(f"{root}/x")) == (True, True, False)
    assert FS.is_exist(f"{root}/broken")
    assert not FS.need_upload_download()


def test_folders(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b")
    FS.mkdirs(path)
    FS.mkdirs(path)
    FS.touch(f"{path}/f")
    with pytest.raises(FSFileExistsError, match="a file with this name"):
        FS.mkdirs(f"{path}/f")
    FS.delete(str(tmp_path / "a"))
    FS.delete(str(tmp_path / "a"))
    assert not FS.is_exist(str(tmp_path / "a"))


def test_deleting_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    FS.delete(str(tmp_path / "link"))
    assert (tmp_path / "real").is_dir()
    assert not FS.is_exist(str(tmp_path / "link"))


def test_touch(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    FS.touch(path)
    FS.touch(path)
    with pytest.raises(FSFileExistsError):
        FS.touch(path, exist_ok=False)


def test_mv_and_rename(tmp_path: Path) -> None:
    """B.8: a missing source and an existing target have errors of their own."""
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    with pytest.raises(FSFileNotExistsError):
        FS.mv(old, new)
    Path(old).write_text("1")
    Path(new).mkdir()
    (Path(new) / "inside").write_text("")
    with pytest.raises(FSFileExistsError):
        FS.mv(old, new)
    FS.mv(old, new, overwrite=True)
    assert Path(new).read_text() == "1"
    FS.rename(new, old)
    assert Path(old).read_text() == "1"
    with pytest.raises(FSFileExistsError, match="the same"):
        FS.mv(old, old, overwrite=True)
    assert Path(old).read_text() == "1"


def test_copies(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    FS.upload(str(tmp_path / "d"), str(tmp_path / "copy"))
    FS.download(str(tmp_path / "copy" / "f"), str(tmp_path / "g"))
    assert (tmp_path / "g").read_text() == "x"
    with pytest.raises(FSFileExistsError):
        FS.upload(str(tmp_path / "d"), str(tmp_path / "copy"))
    (tmp_path / "d" / "f").write_text("y")
    FS.upload(str(tmp_path / "d"), str(tmp_path / "copy"), overwrite=True)
    assert (tmp_path / "copy" / "f").read_text() == "y"
    with pytest.raises(FSFileNotExistsError):
        FS.download(str(tmp_path / "absent"), str(tmp_path / "h"))


def test_the_client_of_another_company_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="HDFSClient"):
        AFSClient("home", {})


def test_every_name_of_the_module_is_there() -> None:
    for name in fleet.utils.fs.__all__:
        assert hasattr(fleet.utils.fs, name)
    from fleet.utils import HDFSClient, LocalFS, run_check

    assert HDFSClient is fleet.utils.fs.HDFSClient
    assert LocalFS is fleet.utils.fs.LocalFS
    assert callable(run_check)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        fleet.utils.nothing_like_it  # noqa: B018
