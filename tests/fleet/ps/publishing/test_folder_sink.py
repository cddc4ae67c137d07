"""Rows in a folder: the manifest names complete files only, and what the deltas say becomes the base."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError, ConfigError
from fleet.ps.publishing.delta import Delta, RowsDelta, StaleDelta, decode
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.tensor_file import read_tensors
from fleet.ps.publishing.versions import MANIFEST
from tests.fleet.ps.publishing.rig import PublishingService

Rows = dict[str, dict[int, bytes]]


def rows_in(folder: Path) -> Rows:
    """Reads the folder as its documentation says."""
    manifest = json.loads((folder / MANIFEST).read_text())
    found: Rows = {}
    for state in manifest["servers"].values():
        position = state["base"]["previous"] if state["base"] else 0
        for entry in (state["base"], *state["deltas"]):
            data = (folder / entry["file"]).read_bytes()
            assert (len(data), zlib.crc32(data)) == (entry["bytes"], entry["crc32"])
            assert entry is state["base"] or entry["previous"] == position
            position = entry["watermark"]
            tensors = read_tensors(folder / entry["file"])
            for name in [name[:-5] for name in tensors if name.endswith(".keys")]:
                table = found.setdefault(name, {})
                for key in tensors[f"{name}.deleted"].tolist():
                    table.pop(key, None)
                rows = decode(tensors[f"{name}.values"], tensors.get(f"{name}.scales"))
                table.update(zip(tensors[f"{name}.keys"].tolist(), [row.tobytes() for row in rows], strict=True))
        assert position == state["watermark"]
    return found


def delta(previous: int, watermark: int, keys: list[int], deleted: tuple[int, ...] = (), **fields: object) -> Delta:
    rng = np.random.default_rng(watermark)
    values = rng.standard_normal((len(keys), 3)).astype(np.float32)
    table = RowsDelta("ads", np.array(keys, np.int64), values, np.array(deleted, np.int64))
    plain = {"job": "shop", "server": 0, "num_servers": 1, "history": "00000001-a", "step": 0, "pushed_at": 1.0}
    return Delta(
        **{**plain, "previous": previous, "watermark": watermark, "whole": False, "tables": (table,), **fields}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8"])
def test_deltas_become_a_base_without_another_rounding(tmp_path: Path, values: str) -> None:
    plain = FolderSink(tmp_path / "plain", "shop", values)
    merging = FolderSink(tmp_path / "merging", "shop", values, fewest_rows=0)
    rng = np.random.default_rng(0)
    for number in range(12):
        keys = rng.choice(30, 5, replace=False)
        one = delta(number, number + 1, keys[:3].tolist(), tuple(keys[3:].tolist()), whole=number == 0)
        plain.write(one)
        merging.write(one)
        assert rows_in(tmp_path / "merging") == rows_in(tmp_path / "plain")
    deltas = json.loads((tmp_path / "merging" / MANIFEST).read_text())["servers"]["0"]["deltas"]
    assert len(deltas) < 6
    assert len(list((tmp_path / "merging").glob("rows-*"))) <= 2 + 2 * 6
    assert merging.position(0) == ("00000001-a", 12)


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    FolderSink(tmp_path, "shop", "bfloat16").write(delta(0, 3, [5, 6], whole=True))
    path = next(tmp_path.glob("*.safetensors"))
    tensors = safetensors.load_file(path)
    assert tensors["ads.keys"].tolist() == [5, 6]
    assert str(tensors["ads.values"].dtype) == "torch.bfloat16"
    np.testing.assert_array_equal(tensors["ads.values"].float(), decode(read_tensors(path)["ads.values"]))


def test_a_publisher_that_died_anywhere_leaves_a_complete_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = FolderSink(tmp_path, "shop", "float32", fewest_rows=0)
    sink.write(delta(0, 3, [5, 6], whole=True))
    before = rows_in(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(
            "fleet.ps.publishing.folder_sink.replace_file", lambda *_: (_ for _ in ()).throw(OSError("killed"))
        )
        with pytest.raises(OSError, match="killed"):
            sink.write(delta(3, 4, [5, 7]))
    assert rows_in(tmp_path) == before
    assert sink.position(0) == ("00000001-a", 3)
    sink.write(delta(3, 5, [5, 7]))
    assert sorted(rows_in(tmp_path)["ads"]) == [5, 6, 7]
    sink.write(delta(5, 6, [5]))
    assert len(list(tmp_path.glob("rows-*"))) <= 3  # what the dead one had written is removed


def test_stale_deltas_and_folders_of_others_are_refused(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path, "shop", "float32")
    sink.write(delta(0, 3, [5], whole=True))
    with pytest.raises(StaleDelta):
        sink.write(delta(2, 4, [5]))
    with pytest.raises(ConfigError, match="values 'float32', this job publishes with 'int8'"):
        FolderSink(tmp_path, "shop", "int8").position(0)
    with pytest.raises(ConfigError, match="job 'shop', this job publishes with 'other'"):
        FolderSink(tmp_path, "other", "float32").position(0)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="Remove the folder"):
        sink.position(0)


def test_files_of_a_server_that_the_job_has_no_longer_are_removed(tmp_path: Path) -> None:
    """Once the manifest after the one that dropped them is written: a reader may still read the one before."""
    sink = FolderSink(tmp_path, "shop", "float32")
    for server in range(2):
        sink.write(delta(0, 3, [5 + server], whole=True, server=server, num_servers=2))
    (tmp_path / "rows-1-mine.txt").touch()
    (tmp_path / "rows-old-copy.safetensors").touch()
    sink.write(delta(0, 3, [7], whole=True, history="00000002-b"))
    assert len(list(tmp_path.glob("rows-1-*.safetensors"))) == 1
    sink.write(delta(3, 4, [8], history="00000002-b"))
    left = {path.name[:8] for path in tmp_path.glob("rows-*")}
    assert left == {"rows-0-0", "rows-1-m", "rows-old"}
    assert set(rows_in(tmp_path)["ads"]) == {7, 8}


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    service = PublishingService(f"folder:{tmp_path / 'rows'}", tmp_path / "ps", 2)
    try:
        client = service.client()
        for round_ in range(6):
            service.push(client, *range(round_, 40 - round_))
            client.alter(0, "shrink", threshold=2 * round_ - 3)
            service.publish()
            assert rows_in(tmp_path / "rows") == service.served()
            service.restart(round_ % 2)
    finally:
        service.close()


def test_links_in_the_folder_are_not_followed(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "rows"
    precious.write_text("precious")
    folder.mkdir()
    sink = FolderSink(folder, "shop", "float32")
    for name in (f".{MANIFEST}.tmp", ".lock"):
        (folder / name).symlink_to(precious)
    with pytest.raises(OSError, match="a symbolic link"):
        sink.write(delta(0, 1, [1, 2], whole=True))
    (folder / ".lock").unlink()
    sink.write(delta(0, 1, [1, 2], whole=True))
    assert set(rows_in(folder)["ads"]) == {1, 2}
    assert precious.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_that_another_user_has_prepared_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match="the folder belongs to user 65534, and this process is user 0"):
        FolderSink(tmp_path, "shop", "float32").write(delta(0, 1, [1], whole=True))
    assert list(tmp_path.iterdir()) == []
