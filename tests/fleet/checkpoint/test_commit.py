"""Records, the index, and what is left where a save stops at any point."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.checkpoint import commit
from fleet.checkpoint.commit import Share, check_target, leave_error, read_index, remove_leftovers, write_share
from fleet.checkpoint.data_files import FileBlock
from fleet.checkpoint.index import Index
from fleet.checkpoint.storage import LocalFolder
from fleet.errors import CheckpointError
from tests.helpers.workers import run_workers

BLOCK = FileBlock("m/a", "uint8", (3,), (0,), (3,))
POINTS = ["save.begin", "save.block", "save.part", "save.manifest", "save.rename"]


def share(token: str, rank: int = 0, world_size: int = 1) -> Share:
    block = FileBlock("m/a", "uint8", (3 * world_size,), (3 * rank,), (3,))
    return Share(token, rank, world_size, [block], {"token": token})


def saved(path: Path) -> str:
    """Returns the token of the checkpoint, all of whose files are there."""
    index = read_index(LocalFolder(path))
    assert all((path / name).stat().st_size == file.num_bytes for name, file in index.files.items())
    return str(index.values["token"])


def failing(at: str, error: BaseException) -> Callable[[str], None]:
    def meet(point: str) -> None:
        if point == at:
            raise error

    return meet


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), OSError(errno.ENOSPC, "full"), ValueError("x")])
def test_an_error_at_any_point_leaves_the_checkpoint_before(tmp_path: Path, point: str, error: Exception) -> None:
    folder = LocalFolder(tmp_path / "c")
    write_share(folder, share("0a"), [b"abc"])
    with pytest.raises(CheckpointError, match="was not written: .*The checkpoint before it is whole") as raised:
        write_share(folder, share("0b"), [b"def"], failing(point, error))
    assert {errno.EIO: "disk reported an error", errno.ENOSPC: "disk is full"}.get(
        getattr(error, "errno", 0), "ValueError: x"
    ) in f"{raised.value}"
    assert saved(tmp_path / "c") == "0a"
    write_share(folder, share("0c"), [b"ghi"])
    assert saved(tmp_path / "c") == "0c"
    assert len(folder.names()) == 2


def test_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_share(LocalFolder(tmp_path), share("0a"), [b"abc"], failing("save.block", KeyboardInterrupt()))


def test_worker_0_commits_what_all_have_written(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    other = threading.Thread(
        target=lambda: (time.sleep(0.2), write_share(folder, share("0a", 1, 2), [b"def"])), daemon=True
    )
    other.start()
    write_share(folder, share("0a", 0, 2), [b"abc"])
    other.join()
    index = read_index(folder)
    assert (len(index.files), sorted(folder.names())) == (2, ["data-0a-00000.safetensors",
        "data-0a-00001.safetensors", "index.json"])  # fmt: skip


def test_another_workers_error_is_named(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    leave_error(folder, share("0a", 1, 2), "its disk is full")
    with pytest.raises(CheckpointError, match="worker 1: its disk is full"):
        write_share(folder, share("0a", 0, 2), [b"abc"])


def test_a_worker_that_does_not_come_is_named_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_PEERS_S", 0.3)
    monkeypatch.setattr(commit, "_WARN_EVERY_S", 0.1)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="worker 1 has not written its part"):
        write_share(LocalFolder(tmp_path), share("0a", 0, 2), [b"abc"], say=said.append)
    assert "waiting for the part of worker 1" in said[0]


def test_a_trainer_that_ends_is_noticed_while_a_part_is_awaited(tmp_path: Path) -> None:
    meet = failing("save.wait", CheckpointError("the trainer has ended"))
    with pytest.raises(CheckpointError, match="the trainer has ended"):
        write_share(LocalFolder(tmp_path), share("0a", 0, 2), [b"abc"], meet)


@pytest.mark.parametrize("point", ["save.block", "save.manifest"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_goes_away_is_no_checkpoint(tmp_path: Path, point: str, replaced: bool) -> None:
    path = tmp_path / "c"

    def meet(at: str) -> None:
        if at == point:
            shutil.rmtree(path, ignore_errors=True)
            if replaced:
                path.write_text("a file")

    with pytest.raises(CheckpointError, match="a file stands where" if replaced else "is gone from the folder"):
        write_share(LocalFolder(path), share("0a"), [b"abc"], meet)
    assert not (path / "index.json").exists()


def test_leftovers_go_and_what_the_index_names_stays(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_share(folder, share("0a"), [b"abc"])
    for name in ("data-0b-00000.safetensors", "record-0b-00001.json", ".index.json.7.tmp", "data-0c-00001.safetensors"):
        (tmp_path / name).write_text("left")
    remove_leftovers(folder, "0c")
    assert sorted(folder.names()) == [
        "data-0a-00000.safetensors", "data-0c-00001.safetensors", "index.json"]  # fmt: skip


def test_under_an_index_that_cannot_be_read_everything_stays(tmp_path: Path) -> None:
    for name in ("data-0b-00000.safetensors", "index.json"):
        (tmp_path / name).write_text("{}")
    remove_leftovers(LocalFolder(tmp_path), "0c")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CheckpointError, match="thesis.tex"):
        check_target(LocalFolder(tmp_path))
    with pytest.raises(CheckpointError, match="is a file"):
        check_target(LocalFolder(tmp_path / "thesis.tex"))


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "absent or empty"), (["data-0a-00000.safetensors"], "did not finish"), (["a.txt"], "no index.json, only")],
)
def test_a_folder_without_an_index_is_no_checkpoint(tmp_path: Path, names: list[str], text: str) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError, match=text):
        read_index(LocalFolder(tmp_path))


def agreed_save(rank: int, world_size: int, where: str) -> str:
    """Saves on workers of which the second one cannot write; returns what it raises."""
    import fleet as plain
    from fleet import fleet

    plain.init(is_collective=True)
    path = Path(where)
    fleet.checkpoint.save(path, {"e": 1})
    original: Any = commit._written
    if rank == 1:
        commit._written = failing_write
    try:
        fleet.checkpoint.save(path, {"e": 2})
    except CheckpointError as error:
        return f"{error} {fleet.checkpoint.load(path)['e']}"
    finally:
        commit._written = original
    return ""


def failing_write(*arguments: Any) -> Index:
    raise OSError(errno.EROFS, "read-only")


def test_all_workers_hear_of_one_that_cannot_write(tmp_path: Path) -> None:
    found = run_workers(agreed_save, 2, f"{tmp_path}/c", backend=None)
    assert found[0] == found[1]
    assert "worker 1: " in found[0]
    assert "read-only" in found[0]
    assert found[0].endswith(" 1")
