"""HDFSClient against a stand-in for the hadoop command."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.utils.fs import (
    ExecuteError,
    FSFileExistsError,
    FSFileNotExistsError,
    FSShellCmdAborted,
    FSTimeOut,
    HDFSClient,
)
from tests.helpers import fake_hadoop


class Hadoop:
    """A Hadoop installation in a folder, and a client for it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        (home / "root").mkdir()
        program = home / "bin" / "hadoop"
        source = Path(fake_hadoop.__file__).read_text()
        program.write_text(f"#!{sys.executable} -S\n{source}")
        program.chmod(0o755)

    def client(self, **settings: Any) -> HDFSClient:
        """Returns a client that tries again at once."""
        chosen: dict[str, Any] = {"time_out": 20000, "sleep_inter": 10, "retry_sleep_s": 0.01, **settings}
        configs = {"fs.default.name": "hdfs://name:9000", "hadoop.job.ugi": "user,pa$$word"}
        return HDFSClient(str(self.home), configs, **chosen)

    def fail(self, *lines: str) -> None:
        """Makes the next starts of the command fail, one for each line."""
        (self.home / "failures").write_text("\n".join(lines))

    def calls(self) -> list[list[str]]:
        """Returns the arguments of every start so far."""
        path = self.home / "calls.log"
        return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def hadoop(tmp_path: Path) -> Hadoop:
    """A fresh Hadoop."""
    home = tmp_path / "hadoop"
    home.mkdir()
    return Hadoop(home)


def test_the_command_line(hadoop: Hadoop) -> None:
    """B.8: ``hadoop fs -Dk=v -command``; without a shell, so text stays text."""
    assert not hadoop.client().is_exist("/a b; touch /tmp/x $(y)")
    assert hadoop.calls() == [
        ["fs", "-Dfs.default.name=hdfs://name:9000", "-Dhadoop.job.ugi=user,pa$$word", "-test", "-e",
         "/a b; touch /tmp/x $(y)"]
    ]  # fmt: skip


def test_looking(hadoop: Hadoop) -> None:
    client = hadoop.client()
    root = hadoop.home / "root"
    (root / "d" / "sub").mkdir(parents=True)
    (root / "d" / "with space").write_text("12345")
    (root / "f").write_text("hello\n")
    assert (client.is_exist("/d"), client.is_dir("/d"), client.is_file("/d")) == (True, True, False)
    assert (client.is_exist("/f"), client.is_dir("/f"), client.is_file("/f")) == (True, False, True)
    assert (client.is_exist("/x"), client.is_dir("/x"), client.is_file("/x")) == (False, False, False)
    assert client.ls_dir("/d") == (["sub"], ["with space"])
    assert client.list_dirs("/d") == ["sub"]
    assert client.ls_dir("/x") == ([], [])
    assert client.cat("/f") == "hello\n"
    assert client.cat("/x") == ""
    assert client.list_files_info(["/d", "/f"]) == [{"path": "/d/with space", "size": 5}, {"path": "/f", "size": 6}]
    assert client.need_upload_download()


def test_changing(hadoop: Hadoop) -> None:
    client = hadoop.client()
    client.mkdirs("/a/b")
    client.touch("/a/f")
    client.touch("/a/f")
    with pytest.raises(FSFileExistsError):
        client.touch("/a/f", exist_ok=False)
    with pytest.raises(FSFileExistsError, match="a file with this name"):
        client.mkdirs("/a/f")
    client.mv("/a/f", "/a/g")
    with pytest.raises(FSFileNotExistsError):
        client.mv("/a/f", "/a/h")
    client.touch("/a/h")
    with pytest.raises(FSFileExistsError):
        client.mv("/a/g", "/a/h")
    client.mv("/a/g", "/a/h", overwrite=True)
    assert client.ls_dir("/a") == (["b"], ["h"])
    client.rename("/a/h", "/a/i")
    assert client.ls_dir("/a") == (["b"], ["i"])
    client.delete("/a")
    client.delete("/a")
    assert not client.is_exist("/a")


def test_upload_and_download(hadoop: Hadoop, tmp_path: Path) -> None:
    client = hadoop.client()
    local = tmp_path / "data"
    (local / "sub").mkdir(parents=True)
    for index in range(4):
        (local / f"part-{index}").write_text(str(index))
    (local / "sub" / "deep").write_text("deep")
    client.upload(str(local), "/up", multi_processes=2)
    client.upload(str(local / "part-1"), "/one")
    assert client.cat("/one") == "1"
    client.download("/up", str(tmp_path / "down"), multi_processes=2)
    client.download("/one", str(tmp_path / "one"))
    assert (tmp_path / "one").read_text() == "1"
    assert sorted(path.name for path in (tmp_path / "down").rglob("*")) == [
        "deep", "part-0", "part-1", "part-2", "part-3", "sub",
    ]  # fmt: skip
    for call in (lambda: client.upload(str(local), "/up"), lambda: client.download("/up", str(tmp_path / "down"))):
        with pytest.raises(FSFileExistsError):
            call()
    (local / "part-0").write_text("new")
    client.upload(str(local), "/up", overwrite=True)
    client.download("/up", str(tmp_path / "down"), overwrite=True)
    assert (tmp_path / "down" / "part-0").read_text() == "new"
    client.upload_dir(str(local), "/up")
    assert client.is_file("/up/data/part-3")
    for call in (lambda: client.upload("absent", "/x"), lambda: client.download("/absent", str(tmp_path / "x"))):
        with pytest.raises(FSFileNotExistsError):
            call()


def test_a_command_that_fails_at_first_is_tried_again(hadoop: Hadoop) -> None:
    """B.8: five retries."""
    hadoop.fail(*["255 Connection refused"] * 5)
    hadoop.client().touch("/f")  # the look comes first: it fails five times, then the file is made
    assert (hadoop.home / "root" / "f").exists()


def test_one_try_is_a_command_and_five_retries(hadoop: Hadoop) -> None:
    """B.8: 1 + 5 starts of a command that keeps failing."""
    client = hadoop.client(time_out=1500, sleep_inter=2000)
    (hadoop.home / "root" / "f").write_text("x")
    hadoop.fail("0", "1", *["255 Connection refused"] * 20)  # the two looks of is_file answer
    with pytest.raises(FSTimeOut) as caught:
        client.cat("/f")
    assert isinstance(caught.value.__cause__, ExecuteError)
    assert [call[3] for call in hadoop.calls()].count("-cat") == 6


def test_a_failing_file_system_is_not_a_missing_file(hadoop: Hadoop) -> None:
    """A name node that cannot be reached must not look like "does not exist"."""
    hadoop.fail(*["1 Call From host to name:9000 failed: Connection refused"] * 100)
    with pytest.raises(FSTimeOut, match="Connection refused"):
        hadoop.client(time_out=600, sleep_inter=100).is_exist("/f")


def test_a_hanging_command_is_ended(hadoop: Hadoop) -> None:
    hadoop.fail("hang")
    start = time.monotonic()
    with pytest.raises(FSTimeOut, match="did not end within 1 s"):
        hadoop.client(time_out=1000).is_exist("/f")
    assert time.monotonic() - start < 10


def test_an_abort_is_not_tried_again(hadoop: Hadoop) -> None:
    """B.8: exit status 134."""
    hadoop.fail("134 aborted", "134 aborted")
    with pytest.raises(FSShellCmdAborted):
        hadoop.client().is_exist("/f")
    assert len(hadoop.calls()) == 1


def test_missing_rights_are_not_tried_again(hadoop: Hadoop) -> None:
    hadoop.fail("0", "1", "1 rm: Permission denied: user=x", "0")
    with pytest.raises(ExecuteError, match="Permission denied") as caught:
        hadoop.client().cat("/f")
    assert not isinstance(caught.value, FSTimeOut)
    assert len(hadoop.calls()) == 3


def test_a_move_that_seemed_to_fail_counts(hadoop: Hadoop) -> None:
    """The connection broke after the name node had moved the file: the second try finds no source."""
    client = hadoop.client()
    (hadoop.home / "root" / "new").write_text("x")
    hadoop.fail("0", "1", "1 mv: `/old': No such file or directory")
    client.mv("/old", "/new")


def test_messages_hold_no_password(hadoop: Hadoop) -> None:
    hadoop.fail("134")
    with pytest.raises(FSShellCmdAborted) as caught:
        hadoop.client().is_exist("/f")
    assert "pa$$word" not in str(caught.value)
    assert "-Dhadoop.job.ugi=*** -test -e /f" in str(caught.value)


def test_properties_with_other_names_for_a_password_are_hidden(hadoop: Hadoop) -> None:
    """Issue 10, Medium 8: dfs.client.pass."""
    hadoop.fail("134")
    client = HDFSClient(str(hadoop.home), {"dfs.client.pass": "pa$$word", "dfs.replication": "3"})
    with pytest.raises(FSShellCmdAborted, match=r"-Ddfs.client.pass=\*\*\* -Ddfs.replication=3 -test") as caught:
        client.is_exist("/f")
    assert "pa$$word" not in str(caught.value)
    with pytest.raises(ConfigError, match="is a str; it takes a dictionary") as refused:
        HDFSClient(str(hadoop.home), "dfs.client.pass=pa$$word")  # type: ignore[arg-type]
    assert "pa$$word" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"time_out": -1}, "time_out=-1"), ({"sleep_inter": "x"}, "sleep_inter='x'"), ({"retry_times": 1.5}, "1.5")],
)
def test_bad_settings_are_refused(hadoop: Hadoop, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hadoop.client(**settings)


def test_a_missing_hadoop_is_refused(hadoop: Hadoop) -> None:
    shutil.rmtree(hadoop.home / "bin")
    with pytest.raises(ConfigError, match="not an executable"):
        hadoop.client()
    with pytest.raises(ConfigError, match="is a str; it takes a dictionary"):
        HDFSClient(str(hadoop.home), "x")  # type: ignore[arg-type]


def test_parallel_copies_need_a_number(hadoop: Hadoop, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="multi_processes=0"):
        hadoop.client().upload(str(tmp_path / "data"), "/up", multi_processes=0)
    assert not (hadoop.home / "root" / "up").exists()
