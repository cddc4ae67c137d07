"""Data files: safetensors files, written in one pass with a sum for each block, and read by ranges of bytes.

Source of the format: "Format" in the README of the safetensors project: eight bytes with the length of the header,
little-endian; the header, JSON padded with spaces; then the data of all tensors without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fleet.checkpoint.index import BLOCK_BYTES, DTYPES, DataFile, Index, Piece, TensorEntry
from fleet.common.plain_files import open_to_read
from fleet.errors import CheckpointError

_ALIGNMENT = 64  # of the data in the file, so that a mapped tensor is aligned for every type
_SPAN_BYTES = 16 << 20  # summed at once beside the write: with less, switching threads costs more than it gains
_LARGE_BYTES = 64 << 20  # from here on, the header is padded to a whole block of sums


@dataclass(frozen=True)
class FileBlock:
    """One tensor, or a box of one, that a file will hold.

    Attributes:
        name: name of the whole tensor.
        dtype: torch's name of the type.
        shape: shape of the whole tensor.
        offsets: where the box begins in it.
        sizes: the shape of the box.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return Piece("", 0, self.offsets, self.sizes).numel * DTYPES[self.dtype][0]

    @property
    def key(self) -> str:
        """The name in the file: the tensor's, with the offsets of a box that is not the whole."""
        return self.name if self.sizes == self.shape else f"{self.name}@{','.join(map(str, self.offsets))}"


def block_of(found: Mapping[str, Any]) -> FileBlock:
    """Returns the block whose fields ``found`` holds, as JSON gives them back."""
    lists = {name: tuple(found[name]) for name in ("shape", "offsets", "sizes")}
    return FileBlock(found["name"], found["dtype"], **lists)


def add_block(record: Index, block: FileBlock, file: str, begin: int) -> None:
    """Adds ``block``, whose bytes begin at ``begin`` of ``file``, to ``record``."""
    entry = record.tensors.setdefault(block.name, TensorEntry(block.dtype, block.shape))
    entry.pieces.append(Piece(file, begin, block.offsets, block.sizes))


def file_order(block: FileBlock) -> tuple[int, int]:
    """Returns the key by which a file sorts its blocks: the widest types first, so that all are aligned.

    Of one type, those that fill whole blocks of sums come first, then whole halves of them, and so on: a part of a
    tensor that ends at such a boundary is verified without the bytes beside it.
    """
    largest_power_of_two = block.num_bytes & -block.num_bytes
    return -DTYPES[block.dtype][0], -min(largest_power_of_two, BLOCK_BYTES)


def in_file_order(blocks: Iterable[FileBlock]) -> list[FileBlock]:
    """Returns ``blocks`` as a file holds them, equal ones in their order here; see :func:`file_order`."""
    return sorted(blocks, key=file_order)


def make_header(blocks: Sequence[FileBlock], metadata: dict[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Returns the beginning of a file that holds ``blocks`` in this order, and the first byte of each in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begin = 0
    begins = []
    for block in blocks:
        end = begin + block.num_bytes
        key = block.key
        while key in header:  # a tensor may have the name of another one's box, or "__metadata__"
            key += "@"
        header[key] = {
            "dtype": DTYPES[block.dtype][1], "shape": list(block.sizes), "data_offsets": [begin, end],
        }  # fmt: skip
        begins.append(begin)
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data of a large file begins where a block of sums does, so that blocks and tensors share boundaries, see
    # file_order().
    text += b" " * (-(len(text) + 8) % (_ALIGNMENT if begin < _LARGE_BYTES else BLOCK_BYTES))
    start = len(text) + 8
    return struct.pack("<Q", len(text)) + text, [start + begin for begin in begins]


def read_header(data: bytes | memoryview, num_bytes: int, label: str) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file and where its data begins; ``data`` is the file's beginning.

    Raises CheckpointError that begins with ``label`` when it is not such a header, or names a tensor twice or bytes
    outside the file.
    """
    try:
        (length,) = struct.unpack("<Q", data[:8])
        if not 2 <= length <= len(data) - 8:
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(bytes(data[8 : 8 + length]), object_pairs_hook=_without_twins)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not type(begin) is type(end) is int or not 0 <= begin <= end <= num_bytes - 8 - length:
                raise ValueError(f"{name!r} lies outside the file")
        return header, 8 + length
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{label} is no safetensors file: {error}.") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    # json would keep the last of two equal names, without an error.
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found


class SummedFile:
    """Writes bytes to ``file`` and keeps the CRC-32 of each block of ``BLOCK_BYTES``.

    A thread, which ends with this object, sums blocks while they are written: neither holds the interpreter's lock,
    and on one thread the sums take a fifth of the time of a write.

    Args:
        file: open for writing; not buffered, or flushed by the caller.
        before_block: called before each block is written; it may raise to stop.
    """

    def __init__(self, file: Any, before_block: Callable[[], None] = lambda: None) -> None:
        self._file = file
        self._before_block = before_block
        self._num_bytes = 0
        self._sum = 0  # of the last block, as far as it is summed
        self._sums: list[int] = []
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []

    def write(self, data: Any) -> None:
        """Writes all of ``data``, bytes or anything with the buffer protocol that is contiguous.

        Its bytes may not change before :meth:`finish`.
        """
        view = memoryview(data)
        if not view.nbytes:  # a view with a dimension of 0 cannot be cast
            return
        view = view.cast("B")
        for begin in range(0, len(view), _SPAN_BYTES):
            span = view[begin : begin + _SPAN_BYTES]
            self._start_sums(span)
            for at in range(0, len(span), BLOCK_BYTES):
                self._before_block()
                _write_all(self._file, span[at : at + BLOCK_BYTES])

    def _start_sums(self, span: memoryview) -> None:
        # A span stays in memory until it is summed, so no more than two wait.
        while len(self._waiting) > 1:
            self._waiting.pop(0).result()
        # Handing a small span to the thread would cost more than summing it here; a waiting one must come first.
        if len(span) < BLOCK_BYTES and not self._waiting:
            self._add(span)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "fleet-checkpoint-sums")
        self._waiting.append(self._thread.submit(self._add, span))

    def _add(self, span: memoryview) -> None:
        """Sums ``span``; one at a time, in the order of the file."""
        at = 0
        while at < len(span):
            part = span[at : at + BLOCK_BYTES - self._num_bytes % BLOCK_BYTES]
            self._sum = zlib.crc32(part, self._sum)
            self._num_bytes += len(part)
            at += len(part)
            if self._num_bytes % BLOCK_BYTES == 0:
                self._sums.append(self._sum)
                self._sum = 0

    def finish(self) -> DataFile:
        """Returns length and sums of the file."""
        for one in self._waiting:
            one.result()
        if self._thread is not None:
            self._thread.shutdown()
        last = [self._sum] if self._num_bytes % BLOCK_BYTES else []
        return DataFile(self._num_bytes, tuple(self._sums + last))


def _write_all(file: Any, part: memoryview) -> None:
    while len(part):  # an unbuffered file may take less than it is given
        written = file.write(part)
        part = part[len(part) if written is None else written :]


class Ranges(Protocol):
    """A file that is read by ranges of bytes."""

    num_bytes: int

    def range(self, begin: int, end: int) -> memoryview:
        """Returns the bytes from ``begin`` up to ``end``."""
        ...

    def release(self, begin: int, end: int) -> None:
        """Lets go of the memory of these bytes; they can be read again."""
        ...

    def close(self) -> None:
        """Closes the file; views of it stay valid where the platform allows it."""
        ...


class MappedFile:
    """A local file, mapped into memory: a range costs no copy, and only touched pages are read from disk.

    The map is private, because torch takes writable memory alone; no change of it reaches the file.
    """

    def __init__(self, path: Path, label: str) -> None:
        try:
            with open_to_read(path) as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.num_bytes else None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{label}: {getattr(error, 'strerror', None) or error}.") from error
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def range(self, begin: int, end: int) -> memoryview:
        """Returns a view of the mapped bytes."""
        return self._view[begin:end]

    def release(self, begin: int, end: int) -> None:
        """Takes whole pages out of this process; they stay in the cache of the system while it has room."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Releases the map once nothing views it."""
        self._view.release()


class DataReader:
    """Reads ranges of one data file, and verifies the sum of every block that a range touches, once.

    Args:
        ranges: the file.
        described: its length and sums, from the index.
        label: how errors name it.
        check_sums: whether blocks are verified; without it, exactly the requested bytes are read.

    Raises:
        CheckpointError: the file has another length than the index says.

    Attributes:
        num_read: bytes read so far, those of verified blocks included.
    """

    def __init__(self, ranges: Ranges, described: DataFile, label: str, check_sums: bool = True) -> None:
        if ranges.num_bytes != described.num_bytes:
            raise CheckpointError(
                f"{label} has {ranges.num_bytes} bytes; {described.num_bytes} were written. It was cut off or replaced."
            )
        self._ranges = ranges
        self._described = described
        self._label = label
        self._check_sums = check_sums
        self._verified: set[int] = set()
        self.num_read = 0

    def range(self, begin: int, end: int) -> memoryview:
        """Returns the bytes from ``begin`` up to ``end``.

        Raises CheckpointError where a block does not match its sum.
        """
        if not self._check_sums:
            self.num_read += end - begin
            return self._ranges.range(begin, end)
        start, stop = self._blocks_of(begin, end)
        # Once for all its blocks: a remote file answers one request.
        data = self._ranges.range(start, stop)
        for first in range(start, stop, BLOCK_BYTES):
            block = first // BLOCK_BYTES
            last = min(first + BLOCK_BYTES, stop)
            if block in self._verified:
                continue
            if zlib.crc32(data[first - start : last - start]) != self._described.sums[block]:
                raise CheckpointError(
                    f"{self._label}: bytes {first} to {last} do not match their sum: the file was damaged after it was "
                    "written. Load an earlier checkpoint."
                )
            self._verified.add(block)
            self.num_read += last - first
        return data[begin - start : end - start]

    def release(self, begin: int, end: int) -> None:
        """Releases the memory that :meth:`range` has filled for these bytes; nobody may view them afterwards."""
        self._ranges.release(*(self._blocks_of(begin, end) if self._check_sums else (begin, end)))

    def _blocks_of(self, begin: int, end: int) -> tuple[int, int]:
        stop = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        return begin // BLOCK_BYTES * BLOCK_BYTES, min(stop, self._described.num_bytes)

    def close(self) -> None:
        """Closes the file."""
        self._ranges.close()


def write_file(
    file: BinaryIO | Any, blocks: Sequence[FileBlock], data: Iterable[Any],
    before_block: Callable[[], None] = lambda: None, metadata: dict[str, str] | None = None,
) -> tuple[DataFile, list[int]]:  # fmt: skip
    """Writes a whole data file; returns its length and sums, and the first byte of each of ``blocks``.

    Args:
        file: open for writing in binary mode.
        blocks: its content, in the order of :func:`in_file_order`.
        data: the contiguous bytes of each block, in that order.
        before_block: see :class:`SummedFile`.
        metadata: further texts for the header.
    """
    header, begins = make_header(blocks, metadata)
    summed = SummedFile(file, before_block)
    summed.write(header)
    for one in data:
        summed.write(one)
    return summed.finish(), begins
