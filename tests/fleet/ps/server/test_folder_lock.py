"""The folder of a server: one process has it at a time; it may be removed or of no use (PS design 3)."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from fleet.errors import PSError
from fleet.ps.server.folder_lock import FolderLock
from tests.fleet.ps.service import SPARSE, gradient, rows, serving, until

OTHER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_server_on_the_folder_is_refused_and_leaves_it_alone(tmp_path, monkeypatch):
    folder = tmp_path / "server-0"
    (folder / "journal").mkdir(parents=True)
    torn = folder / "journal" / f"journal-{1:020d}.log"
    torn.write_bytes(b"half a record of the first server")
    with subprocess.Popen(
        [sys.executable, "-S", "-c", OTHER, str(folder / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        monkeypatch.setattr("fleet.ps.server.server.FolderLock", lambda path: FolderLock(path, patience_s=0.0))
        with pytest.raises(PSError, match="another process uses"), serving(folder=tmp_path):
            pass
        assert torn.read_bytes() == b"half a record of the first server"
        other.stdin.close()
        other.wait(30)
    FolderLock(folder).release()  # a process that has ended keeps nobody out


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    """PS design 3: somebody cleans up; a later kill must still find every acknowledged push."""
    lines = []
    with serving(folder=tmp_path / "s", lease_s=1.0) as service:
        client = service.client(tables={0: SPARSE})
        service.servers[0]._notify = lines.append
        client.wait(client.push({0: gradient([1])}))
        shutil.rmtree(tmp_path / "s")
        until(lambda: list((tmp_path / "s").glob("server-0/snapshot-*")))
        assert any("was removed" in line for line in lines)
        client.wait(client.push({0: gradient([1])}))
        service.servers[0].stop()
        service.start(0)
        assert rows(client, [1])[0, 0] == -2


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("what", ["moved", "snapshots"])
def test_what_a_restart_needs_is_written_anew(tmp_path, what, level):
    """A folder that was moved away, or snapshots alone, went unnoticed: a restart had nothing, or was refused."""
    with serving(folder=tmp_path / "s", lease_s=1.0, level=level) as service:
        client = service.client(tables={0: SPARSE})
        client.wait(client.push({0: gradient([1])}))
        client.snapshot()
        if what == "moved":
            (tmp_path / "s").rename(tmp_path / "t")
        else:
            (tmp_path / "t").mkdir()
            for path in (tmp_path / "s").glob("server-0/snapshot-*"):
                path.rename(tmp_path / "t" / path.name)
        client.wait(client.push({0: gradient([1])}))
        until(lambda: list((tmp_path / "s").glob("server-0/snapshot-*")))
        client.wait(client.push({0: gradient([1])}))
        service.servers[0].stop()
        service.start(0)
        client.wait(client.push({0: gradient([1])}))
        assert rows(client, [1])[0, 0] == -4


def test_the_new_folder_is_locked_too(tmp_path):
    """Another server could begin in it, and both would write there."""
    command = [sys.executable, "-S", "-c", OTHER.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB"), str(tmp_path / ".lock")]
    lock = FolderLock(tmp_path)
    lock.renew()
    for _ in range(2):
        assert subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode
        (tmp_path / ".lock").unlink()
        lock.renew()
    lock.release()
    assert not subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "s").write_text("a file")
    with pytest.raises(PSError, match="parameter server 0 cannot use its folder"), serving(folder=tmp_path / "s"):
        pass
