"""Files of checked chunks, for snapshots. A file without an end chunk is incomplete."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fleet.errors import CheckpointError
from fleet.ps.files.row_file import bytes_left
from fleet.ps.wire.messages import Buffer

_CHUNK = struct.Struct("<8sQQIIQ")
_CRC = struct.Struct("<II")
_CHUNK_MAGIC = b"FLPSROW1"
_END = 255
END_BYTES = _CHUNK.size + _CRC.size


def block_checksum(data: Buffer) -> int:
    """Returns 32 bits that change with any changed word, a lost end, or swapped 4 KB blocks.

    It is the crc32 of the sums of the blocks, about fifteen times as fast as the crc32 of the data, which would slow
    down requests. It guards against torn writes, not against forgery.
    """
    size = len(data)
    blocks = size // 4096
    words = np.frombuffer(data, np.uint64, blocks * 512).reshape(blocks, 512)
    sums = np.add.reduce(words, axis=1, dtype=np.uint64)
    return zlib.crc32(memoryview(data)[blocks * 4096 :], zlib.crc32(sums.tobytes(), size & 0xFFFFFFFF))


def write_chunk(file: BinaryIO, n: int, stamp: int, width: int, kind: int, payload: Buffer) -> None:
    """Appends one chunk: ``n`` items known up to record ``stamp``; ``width`` and ``kind`` are the caller's."""
    head = _CHUNK.pack(_CHUNK_MAGIC, n, stamp, width, kind, len(payload))
    file.write(head + _CRC.pack(zlib.crc32(head), block_checksum(payload)))
    file.write(payload)


def write_end(file: BinaryIO) -> None:
    """Appends the end chunk."""
    write_chunk(file, 0, 0, 0, _END, b"")


def read_chunks(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Yields (n, stamp, width, kind, payload) of each chunk.

    Raises:
        CheckpointError: a chunk is damaged, or the end is missing.
    """
    while True:
        head = file.read(_CHUNK.size)
        crc = file.read(_CRC.size)
        if len(crc) != _CRC.size:
            raise CheckpointError(f"{path}: the snapshot ends early; restore it from a copy.")
        magic, n, stamp, width, kind, size = _CHUNK.unpack(head)
        # The head has a checksum apart from the payload: a damaged size must not be read, or allocated.
        head_crc, checksum = _CRC.unpack(crc)
        is_head = magic == _CHUNK_MAGIC and head_crc == zlib.crc32(head) and size <= bytes_left(file)
        payload = file.read(size) if is_head else None
        if payload is None or len(payload) != size or block_checksum(payload) != checksum:
            raise CheckpointError(f"{path}: the snapshot is damaged before byte {file.tell()}; restore it from a copy.")
        if kind == _END:
            return
        yield n, stamp, width, kind, payload


def read_end(file: BinaryIO, path: Path) -> None:
    """Reads the end chunk; raises :class:`CheckpointError` for any other chunk."""
    if list(read_chunks(file, path)):
        raise CheckpointError(f"{path}: the snapshot continues where its end should be; restore it from a copy.")
