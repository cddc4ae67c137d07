"""Chunk files: what was written comes back, and no damage does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import CheckpointError
from fleet.ps.files.chunks import END_BYTES, read_chunks, read_end, write_chunk, write_end

CHUNKS = st.lists(
    st.tuples(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**31), st.integers(0, 9), st.binary()),
    max_size=4,
)


def written(path, chunks):
    with path.open("wb") as file:
        for chunk in chunks:
            write_chunk(file, *chunk)
        write_end(file)
    return path.read_bytes()


def read(path):
    with path.open("rb") as file:
        return list(read_chunks(file, path))


@settings(max_examples=50, deadline=None)
@given(CHUNKS)
def test_chunks_come_back(tmp_path_factory, chunks):
    path = tmp_path_factory.mktemp("chunks") / "f"
    written(path, chunks)
    assert read(path) == chunks


@settings(max_examples=150, deadline=None)
@given(CHUNKS, st.data())
def test_any_changed_byte_and_any_cut_is_found(tmp_path_factory, chunks, data):
    path = tmp_path_factory.mktemp("chunks") / "f"
    content = bytearray(written(path, chunks))
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read(path)


def test_the_end_is_where_it_should_be(tmp_path):
    path = tmp_path / "f"
    content = written(path, [(1, 2, 3, 4, b"x")])
    with path.open("rb") as file:
        file.seek(len(content) - END_BYTES)
        read_end(file, path)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="continues"):
        read_end(file, path)
