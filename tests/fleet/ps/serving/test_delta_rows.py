from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError, ConfigError
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.versions import MANIFEST
from fleet.ps.serving import delta_rows
from fleet.ps.serving.delta_rows import DeltaRows, is_delta_folder
from fleet.ps.table.partition import servers_of_keys
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain

NONE = np.empty(0, np.int64)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_every_delta_and_every_new_base(tmp_path: Path, encoding: str) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", encoding, fewest_rows=150), 2, encoding)
    assert not is_delta_folder(tmp_path)
    chain.write(changed=150)
    files = DeltaRows(tmp_path)
    bases = set()
    for step in range(1, 25):
        assert files.refresh()
        assert not files.refresh()
        chain.check(*files.state.lookup("ads", IDS))
        assert {server: position.watermark for server, position in files.state.positions.items()} == dict.fromkeys(
            range(2), 10 * step
        )
        assert files.state.positions[0].pushed_at == 100.0 + step
        bases.add(json.loads((tmp_path / MANIFEST).read_text())["servers"]["0"]["base"]["file"])
        if step % 3 == 0:
            chain.check(*_fresh(tmp_path).lookup("ads", IDS))
        chain.write(whole=step == 20)
    assert len(bases) > 3  # the folder was made into a new base several times


def _fresh(folder: Path):
    files = DeltaRows(folder)
    files.refresh()
    return files.state


def test_a_state_stays_what_it_was_when_its_files_are_gone(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", "float32", fewest_rows=1))
    chain.write()
    files = DeltaRows(tmp_path)
    files.refresh()
    before, state = Chain(FolderSink(tmp_path, "shop", "float32")), files.state
    before.rows = dict(chain.rows)
    for _ in range(6):
        chain.write()
    names = {path.name for path in tmp_path.glob("rows-0-*")}
    assert files._chains[0].entries[0][0] not in names
    before.check(*state.lookup("ads", IDS))
    files.refresh()
    chain.check(*files.state.lookup("ads", IDS))


def test_a_file_that_is_removed_while_it_is_read_leads_to_the_newer_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", "float32", fewest_rows=1))
    chain.write()
    files = DeltaRows(tmp_path)
    read = files._text_of
    texts = [read(None)]
    for _ in range(5):
        chain.write()
    monkeypatch.setattr(
        files, "_text_of", lambda version: texts.pop() if texts else read(version)
    )  # one from before, once
    assert files.refresh()
    chain.check(*files.state.lookup("ads", IDS))


def test_readers_beside_a_publisher(tmp_path: Path) -> None:
    """Every row of a delta has the delta's number, so a lookup that mixes two deltas shows."""
    sink = FolderSink(tmp_path, "shop", "float32", fewest_rows=1000)
    chain = Chain(sink)
    chain.put(0, IDS, np.zeros((len(IDS), DIM), np.float32), NONE, whole=True)
    seen: list[set[float]] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def follow() -> None:
        files = DeltaRows(tmp_path)
        try:
            while True:
                last = done.is_set()
                files.refresh()
                seen.append(set(files.state.lookup("ads", IDS)[0].reshape(-1).tolist()))
                if last:
                    return
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 31):
        chain.put(0, IDS, np.full((len(IDS), DIM), number, np.float32), NONE)
    done.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert all(len(values) == 1 for values in seen)
    assert seen[-1] == {30.0}


@pytest.mark.parametrize("reader", ["map_file", "read_tensors"])
def test_a_file_that_is_removed_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """A publisher that went on has removed it; where the manifest has not changed, nobody has written a newer one."""
    chain = Chain(FolderSink(tmp_path, "shop", "float32", fewest_rows=1000))
    chain.put(0, IDS, np.zeros((len(IDS), DIM), np.float32), NONE, whole=True)
    read = getattr(delta_rows, reader)

    def remove_and_read(path: Path) -> object:
        path.unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(delta_rows, reader, remove_and_read)
    with pytest.raises(CheckpointError, match="the manifest names it, but it is absent"):
        DeltaRows(tmp_path).refresh()


def _edit(folder: Path, change) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(format=2), "a manifest of format 2; this release reads 1"),
        (lambda m: m.pop("servers"), "not a manifest of published rows"),
        (lambda m: m["servers"].update({"0": {}}), "not a manifest of published rows"),
        (lambda m: m["servers"]["0"]["deltas"].pop(0), "do not follow each other"),
        (lambda m: m["servers"]["0"]["deltas"].pop(), "do not follow each other"),
        (lambda m: m["servers"]["0"]["base"].update(file="../rows"), "an entry of server 0"),
        (lambda m: m["servers"]["0"]["base"].update(bytes=1), "the size is wrong"),
        (lambda m: m["servers"]["0"]["base"].update(crc32=1), "the checksum"),
        (lambda m: m["servers"]["0"].update(step="3"), "the position of server 0"),
    ],
)
def test_a_manifest_that_is_wrong(tmp_path: Path, change, text: str) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", "float32"))
    for _ in range(3):
        chain.write()
    files = DeltaRows(tmp_path)
    files.refresh()
    _edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        DeltaRows(tmp_path).refresh()
    with contextlib.suppress(CheckpointError):
        files.refresh()  # what it has read already it need not read again
    chain.check(*files.state.lookup("ads", IDS))


def test_a_torn_manifest_a_cut_and_an_absent_delta(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", "float32"))
    chain.write()
    chain.write()
    whole = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a manifest of published rows"):
        DeltaRows(tmp_path).refresh()
    (tmp_path / MANIFEST).write_text(whole)
    delta = tmp_path / json.loads(whole)["servers"]["0"]["deltas"][0]["file"]
    data = delta.read_bytes()
    delta.write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match="the size is wrong"):
        DeltaRows(tmp_path).refresh()
    delta.unlink()
    with pytest.raises(CheckpointError, match="the manifest names it, but it is absent"):
        DeltaRows(tmp_path).refresh()


def test_rows_of_two_widths(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", "float32"))
    chain.write()
    chain.put(0, np.array([1]), np.ones((1, DIM + 1), np.float32), NONE)
    with pytest.raises(CheckpointError, match=f"no rows of table 'ads': {DIM + 1} columns after {DIM}"):
        DeltaRows(tmp_path).refresh()
    chain = Chain(FolderSink(tmp_path / "two", "shop", "float32"), 2)
    chain.put(0, np.array([1]), np.ones((1, DIM), np.float32), NONE, whole=True)
    chain.put(1, np.array([2]), np.ones((1, DIM + 1), np.float32), NONE, whole=True)
    with pytest.raises(CheckpointError, match="server 1 has rows of table 'ads' with 4 columns"):
        DeltaRows(tmp_path / "two").refresh()


def test_rows_of_servers_that_have_not_written_are_not_read_as_zeros(tmp_path: Path) -> None:
    chain = Chain(FolderSink(tmp_path, "shop", "float32"), servers=2)
    keys = IDS[servers_of_keys(IDS, 2) == 0]
    chain.put(0, keys, np.ones((len(keys), DIM), np.float32), keys[:0], whole=True)
    rows = DeltaRows(tmp_path)
    with pytest.raises(ConfigError, match=r"of the job's 2 servers only those of number \[0\] have written rows"):
        rows.refresh()
    chain.put(1, IDS[:0], np.empty((0, DIM), np.float32), IDS[:0], whole=True)
    assert rows.refresh()
    assert rows.state.lookup("ads", keys)[1].all()
