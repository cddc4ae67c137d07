"""DiskSpace: a mapped file without a name, for the cold rows of a table.

[Note: Rows on disk]
A table with ``rows="disk"`` has chunks of rows in two tiers: in memory, and in a file that is mapped. A push moves the
rows it meets on disk to memory; a sub-shard whose memory is nearly full moves the rows of lowest rank (see
[Note: Eviction]) to disk, in the request that filled it. A pull reads a row where it is. Where a row lies changes
nothing that a pull gives, a save writes or the journal holds: the file is scratch, and goes with the process.

Requests copy rows with pread and pwrite, which cost less than a page fault and map nothing; walks (saves, snapshots,
shrinks) use the mapping, which sees the same pages.

``memory_bytes`` is divided once: for the index, 36 bytes a row of ``max_rows`` or half of it; for mapped pages, a
sixteenth; the rest for chunks of hot rows. Mapped pages are counted as 64 KiB each, which the system may map around
one, and are unmapped together when they fill their part; they stay in the page cache while the system has room.
Space is allocated on the disk before rows can use it, so a full disk is an error of the request and not a signal.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

from fleet.errors import ConfigError, PSError
from fleet.ps.table.eviction import INDEX_BYTES, limit_of
from fleet.ps.table.hash import NUM_SUB_SHARDS
from fleet.ps.table.layout import CHUNK_ROWS, SparseTableConfig

_RESERVED = 1 << 40  # addresses, not memory
_WINDOW_SHARE, _PAGES_AROUND, _LEAST_USED = 16, 1 << 16, 8
_ADVISE_RANDOM = 1
_LEAST_STEP = 1 << 24


class MemoryPlan:
    """Parts of ``memory_bytes``: ``index_bytes``, ``hot_chunks`` of a sub-shard, ``cold_rows`` that may be mapped."""

    def __init__(self, index_bytes: int, hot_chunks: int, cold_rows: int) -> None:
        self.index_bytes = index_bytes
        self.hot_chunks = hot_chunks
        self.cold_rows = cold_rows


def plan_memory(config: SparseTableConfig, chunk_bytes: int) -> MemoryPlan:
    """Returns how the memory of a table on disk is divided, see [Note: Rows on disk].

    Raises:
        ConfigError: ``memory_bytes`` has no room for the index of ``max_rows``, or for the first hot rows.
    """
    bounds = config.bounds
    assert bounds is not None
    assert bounds.memory_bytes is not None
    waits = config.entry is not None and config.entry.to_attr().startswith("count_filter")
    limit = limit_of(config)
    index = bounds.memory_bytes // 2 if limit is None else INDEX_BYTES * limit * (1 + waits)
    window = bounds.memory_bytes // _WINDOW_SHARE
    chunks = (bounds.memory_bytes - index - window) // (NUM_SUB_SHARDS * chunk_bytes)
    if chunks < 1:
        most = "half of it" if limit is None else f"{index} bytes for max_rows={limit}"
        raise ConfigError(
            f"table {config.name!r}: memory_bytes is {bounds.memory_bytes}; the index takes {most}, and hot rows at "
            f"least {NUM_SUB_SHARDS} pieces of {CHUNK_ROWS} rows, {NUM_SUB_SHARDS * chunk_bytes} bytes. Raise it or "
            "keep rows in memory."
        )
    return MemoryPlan(index, chunks, max(_LEAST_USED, window // _PAGES_AROUND))


class DiskSpace:
    """Space in a folder, mapped from address ``start`` on; it grows and never moves.

    Args:
        folder: where the file is; it has no name, so that nothing is left of it.
        table: name for messages.

    Raises:
        PSError: the folder takes no file, or it cannot be mapped.
    """

    def __init__(self, folder: Path, table: str) -> None:
        self._folder = folder
        self._table = table
        self.size = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise self._failure(error) from None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        found = self._libc.mmap(
            None, _RESERVED, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._file.fileno(), 0
        )
        if found in (None, ctypes.c_void_p(-1).value):
            self._file.close()
            raise self._failure(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
        self.start = int(found)
        self._libc.madvise(self.start, _RESERVED, _ADVISE_RANDOM)

    @property
    def end(self) -> int:
        """The address behind the mapping; the allocated part ends at ``start + size``."""
        return self.start + _RESERVED

    @property
    def descriptor(self) -> int:
        """The open file's."""
        return self._file.fileno()

    def grow(self, num_bytes: int) -> int:
        """Allocates at least ``num_bytes`` more on the disk; returns how many.

        Raises:
            PSError: the disk is full; the space is as before.
        """
        step = max(num_bytes, min(self.size // 4, 1 << 30), _LEAST_STEP)
        for wanted in (step, num_bytes):
            try:
                os.posix_fallocate(self._file.fileno(), self.size, wanted)
            except OSError as error:
                if wanted == num_bytes:
                    raise self._failure(error) from None
            else:
                self.size += wanted
                return wanted
        raise AssertionError("unreachable")

    def _failure(self, error: OSError) -> PSError:
        return PSError(
            f"table {self._table!r}: its rows on disk have no space in {self._folder}: {error.strerror}. The table is "
            "as before. Free some space, set max_rows, or run the table on more servers."
        )

    def close(self) -> None:
        """Gives mapping and file back."""
        self._libc.munmap(self.start, _RESERVED)
        self._file.close()
