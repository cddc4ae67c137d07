"""Row files: blocks of rows with a checksum each.

A block is a header of 48 bytes and the arrays of a :class:`fleet.ps.RowBlock` one after the other, little-endian::

    magic "FPSR", version u16, flags u16 (1: statistics, 2: ranks), rows u32, row_floats u32, crc32 of the arrays u32,
    first and last virtual range u16 each, stamp i64, bytes of the arrays u64, crc32 of the header so far u32, 0 u32
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fleet.common.plain_files import open_to_read
from fleet.errors import CheckpointError
from fleet.ps.table.hash import mix, range_of
from fleet.ps.table.rows import RowBlock, Statistics

_HEADER = struct.Struct("<4sHHIIIHHqQII")
_MAGIC = b"FPSR"
_VERSION = 1
_HAS_STATISTICS, _HAS_RANKS = 1, 2  # flags
_MAX_ROWS, _MAX_FLOATS = 1 << 24, 1 << 24
HEADER_BYTES = _HEADER.size
LEAST_ROW_BYTES = 19  # key, days, count, flags, and one float


def encode_block(block: RowBlock) -> bytes:
    """Returns the block as bytes of a file."""
    flags = block.admitted.astype(np.uint8) | (block.has_embedx.astype(np.uint8) << 1)
    arrays: list[npt.NDArray[np.generic]] = [
        block.keys.astype("<i8"),
        block.unseen_days.astype("<u2"),
        block.counts.astype("<u4"),
        flags,
        block.values.astype("<f4"),
    ]
    if block.statistics is not None:
        kept = block.statistics
        arrays += [kept.shows.astype("<f8"), kept.clicks.astype("<f8")]
        arrays += [kept.delta_scores.astype("<f4"), kept.slots.astype("<u4")]
    if block.ranks is not None:
        arrays.append(block.ranks.astype("<i8"))
    payload = b"".join(array.tobytes() for array in arrays)
    # A block without rows gets an empty interval, 4095 to 0.
    ranges = range_of(mix(block.keys))
    fields = (
        _MAGIC,
        _VERSION,
        _HAS_STATISTICS * (block.statistics is not None) | _HAS_RANKS * (block.ranks is not None),
        len(block),
        block.values.shape[1],
        zlib.crc32(payload),
        int(ranges.min(initial=4095)),
        int(ranges.max(initial=0)),
        block.stamp,
        len(payload),
    )
    head = _HEADER.pack(*fields, 0, 0)[:-8]
    return head + struct.pack("<II", zlib.crc32(head), 0) + payload


def values_offset(rows: int) -> int:
    """Returns how many bytes of a block of ``rows`` rows come before their values."""
    return HEADER_BYTES + (LEAST_ROW_BYTES - 4) * rows


def read_block(file: BinaryIO, path: Path) -> RowBlock:
    """Returns the block at the file's position.

    Raises:
        CheckpointError: the block is cut short, its checksum is wrong, or it is not a block.
    """
    where = f"{path} at byte {file.tell()}"
    head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise CheckpointError(
            f"{where}: the file ends inside a block header ({len(head)} of {HEADER_BYTES} bytes). "
            "The file is damaged; restore it or load another checkpoint."
        )
    magic, version, flags, rows, width, crc, _, _, stamp, size, head_crc, zero = _HEADER.unpack(head)
    if magic != _MAGIC or zlib.crc32(head[:-8]) != head_crc or zero:
        raise CheckpointError(
            f"{where}: no block header here (magic {magic!r}, or a wrong header checksum). The file "
            "is damaged; restore it or load another checkpoint."
        )
    if version != _VERSION:
        raise CheckpointError(f"{where}: blocks of version {version}; this release reads version {_VERSION}.")
    # Every length is checked against the others and the file before memory is allocated for it.
    dtypes = _dtypes(width, bool(flags & _HAS_STATISTICS), bool(flags & _HAS_RANKS))
    if rows > _MAX_ROWS or width > _MAX_FLOATS or size != rows * sum(dtype.itemsize for dtype in dtypes):
        raise CheckpointError(f"{where}: {rows} rows of {width} floats do not make {size} bytes. The file is damaged.")
    payload = file.read(min(size, bytes_left(file)))
    if len(payload) < size:
        raise CheckpointError(
            f"{where}: the file ends inside a block ({len(payload)} of {size} bytes). The file is "
            "damaged; restore it or load another checkpoint."
        )
    if zlib.crc32(payload) != crc:
        raise CheckpointError(
            f"{where}: the checksum of {rows} rows is wrong. The file is damaged; restore it or "
            "load another checkpoint."
        )
    return _decode(payload, rows, dtypes, stamp)


def row_bytes(width: int, has_statistics: bool, has_ranks: bool) -> int:
    """Returns the bytes of one row of ``width`` floats in a block."""
    return sum(dtype.itemsize for dtype in _dtypes(width, has_statistics, has_ranks))


def _dtypes(width: int, has_statistics: bool, has_ranks: bool) -> list[np.dtype[np.void]]:
    shapes: list[tuple[str, int]] = [("<i8", 1), ("<u2", 1), ("<u4", 1), ("u1", 1), ("<f4", width)]
    if has_statistics:
        shapes += [("<f8", 1), ("<f8", 1), ("<f4", 1), ("<u4", 1)]
    if has_ranks:
        shapes.append(("<i8", 1))
    return [np.dtype((kind, (count,))) for kind, count in shapes]


def _decode(payload: bytes, rows: int, dtypes: list[np.dtype[np.void]], stamp: int) -> RowBlock:
    arrays = []
    position = 0
    for dtype in dtypes:
        base = dtype.base
        count = rows * (dtype.itemsize // base.itemsize)
        arrays.append(np.frombuffer(payload, base, count, position))
        position += rows * dtype.itemsize
    keys, unseen_days, counts, flags, values, *rest = arrays
    # Statistics are four arrays, ranks one: a rest that four does not divide ends with ranks.
    ranks = rest.pop().astype(np.int64) if len(rest) % 4 else None
    kinds = (np.float64, np.float64, np.float32, np.uint32)
    kept = Statistics(*(array.astype(kind) for array, kind in zip(rest, kinds, strict=True))) if rest else None
    return RowBlock(
        keys.astype(np.int64),
        unseen_days.astype(np.int64),
        counts.astype(np.int64),
        flags & 1 > 0,
        flags & 2 > 0,
        values.astype(np.float32).reshape(rows, -1) if rows else np.empty((0, dtypes[4].shape[0]), np.float32),
        kept,
        stamp,
        ranks,
    )


def bytes_left(file: BinaryIO) -> int:
    """Returns how many bytes follow the file's position."""
    return max(0, os.fstat(file.fileno()).st_size - file.tell())


def open_plain(path: Path) -> BinaryIO:
    """Returns the file at ``path``, open for reading.

    Raises:
        CheckpointError: it is absent, a symbolic link (which may lead anywhere), or not a regular file.
    """
    try:
        return open_to_read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
