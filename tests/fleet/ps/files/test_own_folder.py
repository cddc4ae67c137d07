"""A server's folder that somebody else has prepared, in a place where every user may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet.errors import ConfigError, FleetError
from fleet.ps.files.own_folder import own_folder
from fleet.ps.server.journal import Journal
from tests.fleet.ps.service import SPARSE, gradient, rows, serving

SEGMENT = f"journal-{1:020d}.log"


def refused(folder: Path, kind: type[FleetError], what: str) -> None:
    with pytest.raises(kind, match=what), serving(folder=folder):
        pass


def test_a_new_folder_is_for_its_user_alone_and_is_used_again(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        own_folder(tmp_path / "state" / "server-0")
    finally:
        os.umask(before)
    assert (tmp_path / "state" / "server-0").stat().st_mode & 0o777 == 0o700
    (tmp_path / "state" / "server-0").chmod(0o2770)  # as Kubernetes leaves it on a volume with an fsGroup
    (tmp_path / "state").chmod(0o777)  # as a volume's own folder often is
    with serving(folder=tmp_path / "state") as service:
        client = service.client(tables={0: SPARSE})
        client.wait(client.push({0: gradient([1])}))
        service.servers[0].stop()
        service.start(0)
        assert rows(client, [1])[0, 0] == -1


@pytest.mark.parametrize("part", [".", "journal"])
def test_folders_that_are_links_or_open_to_everybody_are_refused(tmp_path: Path, part: str) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "server-0" / part
    elsewhere.mkdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere) if part != "." else (tmp_path / "server-0").symlink_to(elsewhere)
    refused(tmp_path, ConfigError, "is a symbolic link; .* set FLEET_PS_FOLDER to another path")
    assert not list(elsewhere.iterdir())
    (tmp_path / "server-0" / part if part != "." else tmp_path / "server-0").unlink()
    path.mkdir(parents=True)
    path.chmod(0o777)
    refused(tmp_path, ConfigError, "has mode 777")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("part", [".", "journal"])
def test_folders_of_another_user_are_refused(tmp_path: Path, part: str) -> None:
    path = tmp_path / "server-0" / part
    path.mkdir(parents=True, mode=0o700)
    os.chown(path, 65534, 65534)
    refused(tmp_path, ConfigError, f"belongs to user 65534 and has mode 7.., but this process is user {os.geteuid()}")


@pytest.mark.parametrize("name", [".lock", f"journal/{SEGMENT}", "snapshot/session.bin"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_no_link_is_written_through_and_no_pipe_waited_for(tmp_path: Path, kind: str, name: str) -> None:
    victim, path = tmp_path / "victim", tmp_path / "server-0" / name.replace("snapshot", f"snapshot-{0:020d}-{1:06d}")
    victim.write_text("precious\n" * 20)
    path.parent.mkdir(parents=True)
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    refused(tmp_path, FleetError, "symbolic link" if kind == "link" else "not a regular file")
    assert victim.read_text() == "precious\n" * 20


def test_the_segment_that_begins_replaces_what_has_its_name(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "journal" / SEGMENT
    victim.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(victim)
    journal = Journal(tmp_path / "journal")
    journal.open()
    journal.close()
    assert victim.read_text() == "precious"
    assert not path.is_symlink()
