"""A checkpoint folder of somebody else names no file outside it, and claims no memory that is not there."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.ps import (
    DenseTable,
    DenseTableConfig,
    Rule,
    SparseTable,
    SparseTableConfig,
    load_dense,
    load_table,
    save_dense,
)
from fleet.ps import save_table as save
from fleet.ps.files.manifest import read_manifest
from fleet.ps.files.text_format import export_text, import_text, save_text
from tests.fleet.ps.reference_store import ReferenceTable

CONFIG = SparseTableConfig("t", 4, Rule("sgd"))


def table(rows: int = 20) -> SparseTable:
    """A table that runs without kernels."""
    made = ReferenceTable(CONFIG)
    if rows:
        keys = np.arange(rows)
        made.push(keys, np.ones((rows, 4), np.float32))
    return made


def forge(path: Path, target: Path | None = None, **changes: Any) -> None:
    """Writes the manifest at ``path`` to ``target`` with other values and a checksum that fits."""
    fields = json.loads(json.loads(path.read_text())["part"]) | changes
    body = json.dumps(fields)
    (target or path).write_text(json.dumps({"format": 1, "crc32": zlib.crc32(body.encode()), "part": body}))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file beside the checkpoint."""
    path = tmp_path / "secret.txt"
    path.write_text("mine")
    return path


def names_of(secret: Path) -> list[str]:
    return [str(secret), f"../../{secret.name}", "..", "", ".", "part-000.json", "part-000-../../secret.txt"]


@pytest.mark.parametrize("number", range(7))
def test_a_save_deletes_nothing_that_a_manifest_names(number: int, tmp_path: Path, secret: Path) -> None:
    """A forged part-007.json made the next save delete a file outside the folder."""
    folder = tmp_path / "c"
    save(table(), folder, save_id="one")
    manifest = folder / "t" / "part-000.json"
    forge(manifest, folder / "t" / "part-007.json", server=7, num_servers=9, data=names_of(secret)[number])
    save(table(), folder, save_id="two")
    assert secret.read_text() == "mine"
    assert load_table(table(0), folder) == 20
    assert not (folder / "t" / "part-007.json").exists()


@pytest.mark.parametrize("number", range(7))
def test_a_load_opens_nothing_outside(number: int, tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "c"
    save(table(), folder)
    forge(folder / "t" / "part-000.json", data=names_of(secret)[number], num_bytes=secret.stat().st_size)
    with pytest.raises(CheckpointError, match="names the file"):
        load_table(table(0), folder)


def test_a_part_of_another_server_is_not_taken(tmp_path: Path) -> None:
    save(table(), tmp_path, server=0, num_servers=2, save_id="one")
    forge(tmp_path / "t" / "part-000.json", tmp_path / "t" / "part-001.json")
    with pytest.raises(CheckpointError, match=r"part-001.json: it is the part of server 0"):
        load_table(table(0), tmp_path)


@pytest.mark.parametrize("which", ["part-*.rows", "part-*.json"])
def test_links_are_not_read(which: str, tmp_path: Path) -> None:
    save(table(), tmp_path)
    path = next((tmp_path / "t").glob(which))
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(CheckpointError, match="a symbolic link, which may lead anywhere"):
        load_table(table(0), tmp_path)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A save removes the older parts of its own server, wherever the link leads."""
    save(table(), tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "t").symlink_to(tmp_path / "theirs" / "t")
    for call in (lambda: save(table(), tmp_path / "mine"), lambda: load_table(table(0), tmp_path / "mine")):
        with pytest.raises(CheckpointError, match="Remove the link"):
            call()
    assert load_table(table(0), tmp_path / "theirs") == 20


def test_a_save_does_not_write_through_links(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "c" / "t"
    folder.mkdir(parents=True)
    for name in (".part-000-00000.tmp", f".part-000.json.{os.getpid()}.tmp"):
        (folder / name).symlink_to(secret)
    export_text(table(), tmp_path / "c")
    save(table(), tmp_path / "c")
    assert secret.read_text() == "mine"
    assert load_table(table(0), tmp_path / "c") == 20


def test_text_parts_are_plain_files(tmp_path: Path, secret: Path) -> None:
    """The message of a wrong line quotes it: through a link it would quote any file."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "part-000-00000").symlink_to(secret)
    with pytest.raises(CheckpointError, match="a symbolic link"):
        import_text(table(0), tmp_path)
    (tmp_path / "t" / "part-000-00000").unlink()
    os.mkfifo(tmp_path / "t" / "part-000-00000")
    with pytest.raises(CheckpointError, match="not a regular file"):  # and no wait for somebody to write to it
        import_text(table(0), tmp_path)


def test_names_that_are_no_parts_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    stranger = tmp_path / "t" / "part-old.json"
    stranger.write_text("{}")
    save_text(table(), tmp_path)
    assert stranger.exists()
    assert import_text(table(0), tmp_path) == 20


WRONG = {
    "rows": ({"rows": -1}, "out of range"),
    "servers": ({"num_servers": 10**12}, "out of range"),
    "text": ({"num_bytes": "7"}, "the wrong type"),
    "truth": ({"mode": True}, "the wrong type"),
    "digits": ({"save_id": 7}, "the wrong type"),
    "config": ({"config": []}, "the wrong type"),
    "data": ({"data": None}, "not a manifest"),
    "kind": ({"kind": "other"}, "not a manifest"),
    "another": ({"other": 1}, "not a manifest"),
    "beyond": ({"extents": [{"offset": 9, "num_bytes": 2**40, "rows": 1, "first": 0, "last": 1}]}, "do not fit"),
    "memory": ({"extents": [{"offset": 0, "num_bytes": 40, "rows": 2**40, "first": 0, "last": 1}]}, "do not fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str, tmp_path: Path) -> None:
    """A number of rows that is not there would reserve memory for them."""
    save(table(), tmp_path)
    changes, words = WRONG[name]
    forge(tmp_path / "t" / "part-000.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        load_table(table(0), tmp_path)


def test_wrong_values_of_a_dense_part(tmp_path: Path) -> None:
    config = DenseTableConfig("mlp", 6, Rule("sgd"), ((2, 3),))
    save_dense(DenseTable(config), tmp_path)
    manifest = tmp_path / "mlp" / "part-000.json"
    good = dataclasses.asdict(read_manifest(manifest))
    changes = [{"rows": 2**40}, {"config": good["config"] | {"start": -1}}, {"config": {"rule": "sgd"}}]
    changes += [{"config": good["config"] | {"shapes": shapes}} for shapes in (None, 6, [6], [["6"]], [[-6]], [[6.0]])]
    for change in changes:
        forge(manifest, **{**good, **change})
        with pytest.raises(CheckpointError, match=r"out of range|not a manifest \('start'\)|the wrong type"):
            load_dense(DenseTable(config), tmp_path)
    forge(manifest, **{**good, "config": good["config"] | {"shapes": [[10**4000] * 9]}})
    with pytest.raises(CheckpointError, match=r"is \[1000+ there and") as caught:
        load_dense(DenseTable(config), tmp_path)
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": ' + "1" * 5000 + "}", "7", '{"format": 1}', "\xff"])
def test_manifests_that_are_something_else(text: str, tmp_path: Path) -> None:
    save(table(), tmp_path)
    (tmp_path / "t" / "part-000.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match="not a manifest"):
        load_table(table(0), tmp_path)


def test_a_block_claims_no_memory_that_its_file_does_not_have(tmp_path: Path) -> None:
    saved = save(table(), tmp_path)
    head = bytearray(saved.path.read_bytes())
    rows, width = 1 << 24, 1 << 20
    head[8:16] = np.array([rows, width], np.uint32).tobytes()
    head[32:40] = np.array([rows * (15 + 4 * width)], np.uint64).tobytes()
    head[40:44] = np.array([zlib.crc32(bytes(head[:40]))], np.uint32).tobytes()
    saved.path.write_bytes(head)
    with pytest.raises(CheckpointError, match="ends inside a block"):
        load_table(table(0), tmp_path)


def test_a_packed_text_of_one_long_line_is_refused(tmp_path: Path) -> None:
    """Three megabytes of it would be three gigabytes in memory."""
    (tmp_path / "t").mkdir()
    with gzip.open(tmp_path / "t" / "part-000-00000.gz", "wb") as file:
        for _ in range(64):
            file.write(b"1" * (1 << 20))
    with pytest.raises(CheckpointError, match="at most 640 bytes as text"):
        import_text(table(0), tmp_path)
