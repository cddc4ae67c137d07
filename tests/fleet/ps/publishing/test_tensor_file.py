"""safetensors files of numpy arrays."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.ps.publishing.tensor_file import read_tensors, write_tensors


def test_arrays_come_back_and_begin_where_their_elements_align(tmp_path: Path) -> None:
    tensors = {
        "c": np.arange(3, dtype=np.int8),
        "b": np.ones((2, 0), np.float32),
        "a": np.arange(5, dtype=np.int64),
        "d": np.arange(3, dtype=np.uint16),
    }
    path = tmp_path / "x.safetensors"
    size, checksum = write_tensors(path, tensors, {"values": "int8"})
    assert (size, checksum) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    back = read_tensors(path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
        assert back[name].ctypes.data % tensor.dtype.itemsize == 0


def test_a_file_that_exists_stays_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.arange(5)}, {})
    with pytest.raises(FileExistsError):
        write_tensors(path, {}, {})
    whole = path.read_bytes()
    for damaged in (b"1234567890", whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no complete safetensors file"):
            read_tensors(path)
