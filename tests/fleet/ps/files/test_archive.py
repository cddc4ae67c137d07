"""A packed checkpoint is refused, wherever one is read: a megabyte of it would be a gigabyte in memory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import CheckpointError
from fleet.ps.files.archive import check_archive, check_parts


def packed(path: Path, pack: int = zipfile.ZIP_DEFLATED) -> Path:
    """A checkpoint of 4 MB in 4 KB, or the same unpacked."""
    plain = io.BytesIO()
    torch.save({"weight": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as target:
        for part in source.infolist():
            target.writestr(zipfile.ZipInfo(part.filename), source.read(part), pack)
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "load": fleet.load,
    "load without sums": lambda path: fleet.load(path, check_sums=False),
}


@pytest.mark.parametrize("reader", READERS)
def test_packed_parts_are_refused(reader: str, tmp_path: Path) -> None:
    bomb, plain = packed(tmp_path / "bomb"), packed(tmp_path / "plain", zipfile.ZIP_STORED)
    assert bomb.stat().st_size < 1 << 14
    with pytest.raises(CheckpointError, match="compressed and could expand to any size"):
        READERS[reader](bomb)
    assert READERS[reader](plain)["weight"].shape == (1 << 20,)


def test_one_part_many_times_is_refused(tmp_path: Path) -> None:
    """Entries that share their data need no packing to claim more than the file has."""
    path = packed(tmp_path / "plain", zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "a") as archive:
        largest = max(archive.filelist, key=lambda part: part.file_size)
        archive.filelist += [largest] * 100
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="here: its parts are compressed"):
        check_archive(path, "here")


def test_what_is_no_archive_is_left_to_torch(tmp_path: Path) -> None:
    old = io.BytesIO()
    torch.save({"a": 1}, old, _use_new_zipfile_serialization=False)
    check_archive(old, "here")
    path = tmp_path / "cut"
    path.write_bytes(packed(tmp_path / "plain").read_bytes()[40:])
    with pytest.raises(CheckpointError):
        fleet.load(path)


def test_parts_that_changed_are_named(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    check_parts(io.BytesIO(whole), "here")
    at = whole.index(torch.arange(1000.0).numpy().tobytes())
    changed = whole[:at] + b"\1" + whole[at + 1 :]
    assert torch.load(io.BytesIO(changed))["a"][0] != 0  # which is why
    with pytest.raises(CheckpointError, match="here is damaged: the checksum of '[^']*/data/0' is wrong"):
        check_parts(io.BytesIO(changed), "here")
    check_parts(io.BytesIO(b"no archive"), "here")
