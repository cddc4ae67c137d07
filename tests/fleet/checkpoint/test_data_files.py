"""Data files are what the safetensors package reads; damage of a block is found when the block is touched."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.checkpoint.data_files import (
    DataReader,
    FileBlock,
    MappedFile,
    SummedFile,
    in_file_order,
    make_header,
    read_header,
    write_file,
)
from fleet.checkpoint.index import BLOCK_BYTES, DTYPES, DataFile
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import bits, many_tensors

NAMES = st.one_of(st.text(max_size=6), st.sampled_from(["w", "w@1", "w@1@", "__metadata__", "a/b"]))


@st.composite
def block_lists(draw: st.DrawFn) -> list[FileBlock]:
    found = []
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - offset)) for offset, size in zip(offsets, shape, strict=True))
        found.append(FileBlock(name, draw(st.sampled_from(sorted(DTYPES))), shape, offsets, sizes))
    return in_file_order(found)


@given(block_lists())
def test_a_header_describes_every_block_once_aligned_and_without_gaps(blocks: list[FileBlock]) -> None:
    header, begins = make_header(blocks)
    size = len(header) + sum(block.num_bytes for block in blocks)
    entries, start = read_header(header, size, "x")
    entries.pop("__metadata__")
    assert len(entries) == len(blocks)
    assert start == len(header)
    assert len(header) % 64 == 0
    at = start
    for block, begin, entry in zip(blocks, begins, entries.values(), strict=True):
        assert begin == at
        assert begin % DTYPES[block.dtype][0] == 0
        assert entry["data_offsets"] == [at - start, at - start + block.num_bytes]
        at += block.num_bytes


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 7))
def test_sums_are_those_of_the_blocks_of_what_was_written(parts: list[bytes], most: int) -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:most]))

    file = Slow()
    summed = SummedFile(file)
    for part in parts:
        summed.write(part)
    whole = b"".join(parts)
    assert file.getvalue() == whole
    assert summed.finish() == DataFile(len(whole), (zlib.crc32(whole),) if whole else ())


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_every_block_has_its_sum(size: int) -> None:
    data = np.arange(size, dtype=np.uint8).tobytes()
    points = []
    summed = SummedFile(io.BytesIO(), lambda: points.append(1))
    summed.write(memoryview(data)[: size // 3])
    summed.write(data[size // 3 :])
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, size, BLOCK_BYTES)]
    assert summed.finish() == DataFile(size, tuple(zlib.crc32(block) for block in blocks))
    assert len(points) >= len(blocks)


def test_what_has_no_elements_is_written_too() -> None:
    summed = SummedFile(io.BytesIO())
    summed.write(np.empty((3, 0)))
    assert summed.finish() == DataFile(0, ())


def written(folder: Path, state: dict[str, torch.Tensor]) -> tuple[Path, DataFile]:
    blocks = in_file_order(
        FileBlock(name, f"{one.dtype}".removeprefix("torch."), tuple(one.shape), (0,) * one.dim(), tuple(one.shape))
        for name, one in state.items()
    )
    path = folder / "data.safetensors"
    with open(path, "wb") as file:
        described, _ = write_file(file, blocks, (bits(state[block.name])[2] for block in blocks), metadata={"a": "b"})
    return path, described


def test_the_safetensors_package_reads_every_type_and_shape(tmp_path: Path) -> None:
    state = many_tensors()
    path, _ = written(tmp_path, state)
    found = safetensors.torch.load_file(path)
    assert {name: bits(one) for name, one in found.items()} == {name: bits(one) for name, one in state.items()}
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "a": "b"}


def test_a_file_of_the_safetensors_package_has_a_header_here() -> None:
    data = safetensors.torch.save({"a": torch.ones(2, 3), "b": torch.zeros(0)})
    header, start = read_header(data, len(data), "x")
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert start + 24 == len(data)


def file_with(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"1234567", struct.pack("<Q", 100) + b"{}", struct.pack("<Q", 1) + b"{}", struct.pack("<Q", 2**63) + b"{}",
        file_with(b"{]"), file_with([1]), file_with({"a": 3}), file_with({"a": {}}), file_with(b"[" * 100_000),
        file_with({"a": ENTRY}), file_with({"a": {**ENTRY, "data_offsets": [3, 2]}}, bytes(4)),
        file_with({"a": {**ENTRY, "data_offsets": [0, 2.5]}}, bytes(4)),
        file_with({"a": {**ENTRY, "data_offsets": [-1, 4]}}, bytes(4)),
        file_with({"a": {**ENTRY, "data_offsets": [False, True]}}, bytes(4)),
        file_with(f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}'.encode(), bytes(4)),
    ],
)  # fmt: skip
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="^x is no safetensors file"):
        read_header(data, len(data), "x")


def reader(path: Path, described: DataFile, check_sums: bool = True) -> DataReader:
    return DataReader(MappedFile(path, "x"), described, "x", check_sums)


def test_a_reader_verifies_the_blocks_it_touches_once_and_no_others(tmp_path: Path) -> None:
    path, described = written(tmp_path, {"a": torch.arange(3 * BLOCK_BYTES // 8)})
    data = bytearray(path.read_bytes())
    data[2 * BLOCK_BYTES + 5] ^= 1
    path.write_bytes(data)
    found = reader(path, described)
    assert found.range(10, BLOCK_BYTES + 10) == data[10 : BLOCK_BYTES + 10]
    assert found.num_read == 2 * BLOCK_BYTES
    found.range(20, 30)
    assert found.num_read == 2 * BLOCK_BYTES
    with pytest.raises(CheckpointError, match=f"bytes {2 * BLOCK_BYTES} to {3 * BLOCK_BYTES} do not match"):
        found.range(BLOCK_BYTES, 2 * BLOCK_BYTES + 1)
    unchecked = reader(path, described, check_sums=False)
    assert unchecked.range(2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 6)[5] == data[2 * BLOCK_BYTES + 5]
    assert unchecked.num_read == 6
    unchecked.close()


def test_a_file_of_another_length_or_none_is_refused(tmp_path: Path) -> None:
    path, described = written(tmp_path, {"a": torch.ones(3)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{described.num_bytes - 1} bytes; {described.num_bytes} were written"):
        reader(path, described)
    with pytest.raises(CheckpointError, match="^x: No such file"):
        MappedFile(tmp_path / "absent", "x")
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(CheckpointError, match="^x: "):
        MappedFile(link, "x")


def test_an_empty_file_has_a_range_without_bytes(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    found = MappedFile(tmp_path / "empty", "x")
    assert (found.num_bytes, found.range(0, 0)) == (0, b"")
    found.close()
