"""MappedParameters: dense parameters of a worker whose memory is that of the server's tables.

[Note: Parameters in the server's memory]
See :mod:`fleet.ps.server.offered_row` for when a server changes what workers read. Here each dense table has a range of
pages, in which its parameters lie once and for all, so that views and arrays of them stay valid. :meth:`attach` maps
the table's memory over the range, privately: what the script writes goes to a copy of the page, which no other process
sees and which follows the server no longer. The system knows which pages are such copies (``/proc/self/pagemap``), so a
write is found exactly (:meth:`is_written`), and :meth:`restore` gives such pages back. :meth:`detach` makes all pages
copies: the values stay as they are, whatever the server does. It comes before everything that would read them while
they change: the end of training, and a step that fails. A fork makes copies, too, because a child does not follow the
server; the worker gives them back after its next step.

Parameters move into the range when nothing else holds their memory, in torch or outside of it; a view from before would
not follow them. If some do not, all are copied as before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import increment_version

from fleet.ps.client.shards import Rows
from fleet.ps.wire.memory_file import NotShared, count_in, open_memory
from fleet.ps.worker.dense_part import DensePart, is_plain

LEAST_MAPPED_BYTES = 1 << 16  # copying less is as fast as asking the system what was written
_ENTRY_BYTES = 8  # of the page map: one number for each page
_FILE_BIT = 61  # of it: the page is the file's; the two bits above it: it is in memory, it is in swap
_PATIENCE_S = 0.5  # for a server that is changing the values
# References to the memory of a parameter that nothing else holds: torch counts the parameter's and that of the object
# which Python has for it; Python counts that object's in torch, the name it has here and the argument.
_TENSORS, _NAMES = 2, 3
_MOST_SIGNALS = 16  # that come while values are copied
_changing = threading.RLock()  # a fork waits for who attaches or detaches
_living: weakref.WeakSet[MappedParameters] = weakref.WeakSet()


class MappedParameters:
    """The parameters of some dense tables, which may lie in the server's memory.

    Args:
        parts: the tables.
    """

    def __init__(self, parts: Sequence[DensePart]) -> None:
        self._parts = parts
        self._ranges: dict[int, _Range] = {}
        self._own: set[int] = set()
        self._places: list[tuple[nn.Parameter, tuple[Any, ...]]] = []
        self._pages = -1
        self._faults = -1  # of this process, when nothing was written
        self.is_attached = False
        _living.add(self)

    def look(self) -> None:
        """Notes whose memory is torch's own; once an array of it is made, torch does not tell any longer."""
        plain = [p for part in self._parts for p in part.parameters if is_plain(p)]
        self._own = {p.data_ptr() for p in plain if p.untyped_storage().resizable()}

    def place(self) -> bool:
        """Moves the parameters to their ranges, if they are not there; returns whether they are."""
        if self._places:
            return self._lie_there()
        parameters = [p for part in self._parts for p in part.parameters]
        if 4 * sum(p.numel() for p in parameters) < LEAST_MAPPED_BYTES or not all(map(self._can_move, parameters)):
            return False
        ranges = {part.table_id: _Range(part.config.size) for part in self._parts}
        with torch.inference_mode(False):
            for part in self._parts:
                values = ranges[part.table_id].values
                part.values(values)
                at = 0
                for parameter in part.parameters:
                    end = at + parameter.numel()
                    parameter.data = torch.from_numpy(values[at:end].reshape(parameter.shape))
                    at = end
        # Where a signal comes before, some lie in ranges that nothing fills, and all are copied from now on.
        self._ranges, self._places = ranges, [(parameter, _place_of(parameter)) for parameter in parameters]
        return True

    def attach(self, places: Mapping[int, Mapping[str, Any]]) -> None:
        """Maps the memory of the tables over the ranges; the parameters have the server's values then.

        Raises:
            NotShared: it cannot be mapped; the parameters keep their values.
        """
        with _changing:
            try:
                if set(places) != set(self._ranges):
                    raise NotShared(f"the server offers tables {sorted(places)} of {sorted(self._ranges)}.")
                for table_id, place in places.items():
                    self._ranges[table_id].attach(place)
                if self._pages < 0:
                    self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
                self._faults = -1
                self._try_out()
                self.is_attached = True
            except (OSError, ValueError) as error:
                self.detach()
                raise NotShared(f"the values cannot be mapped: {error}.") from None
            except NotShared:
                self.detach()
                raise
        self.note_change()

    def note_change(self) -> None:
        """Tells torch that the values of the parameters have changed."""
        increment_version([p for part in self._parts for p in part.parameters])

    def detach(self) -> None:
        """Makes the values the worker's own; they stay as they are, from before or after a step that is being taken."""
        with _changing:
            for own in self._ranges.values():
                own.detach()
            self.is_attached = False

    def detach_whatever_comes(self) -> None:
        """Does :meth:`detach` while an exception is on its way; a second Ctrl-C does not end it half-way."""
        for tries_left in reversed(range(_MOST_SIGNALS)):
            try:
                self.detach()
                return
            except BaseException:
                if not tries_left:
                    raise

    def copy_pages(self) -> None:
        """Makes the values a copy, which :meth:`restore` drops."""
        for own in self._ranges.values():
            own.copy_pages()

    def holds(self) -> bool:
        """Returns whether the parameters lie in the server's memory."""
        return self.is_attached and self._lie_there()

    def is_written(self) -> bool:
        """Returns whether something was written to the parameters since the pages were the server's.

        The first write to a page is a page fault, so there was none if this process has had no fault since the last
        look; looking takes 70 us for 2 MB whose page table is not in the caches.
        """
        faults = _num_faults()
        if faults == self._faults:
            return False
        if any(own.is_written(self._pages) for own in self._ranges.values()):
            return True
        self._faults = faults
        return False

    def restore(self) -> None:
        """Drops what was written: the parameters have the server's values."""
        with _changing:
            for own in self._ranges.values():
                own.restore()

    def given(self) -> dict[int, Rows]:
        """Returns the server's values by table, float32 [size], read-only; they change as the server's do."""
        return {table_id: own.given for table_id, own in self._ranges.items() if own.given is not None}

    # -- inside --------------------------------------------------------------------------------------------------

    def _can_move(self, parameter: nn.Parameter) -> bool:
        """Returns whether nothing but the parameter holds its memory."""
        count = getattr(torch._C, "_storage_Use_Count", None)
        if count is None or sys.platform != "linux" or type(parameter) is not nn.Parameter:
            return False
        if not is_plain(parameter) or not parameter.is_contiguous():
            return False
        storage = parameter.untyped_storage()
        if storage.is_shared() or not (storage.resizable() or parameter.data_ptr() in self._own):
            return False  # it is another process's, a file's, or an array's
        return bool(count(storage._cdata) <= _TENSORS) and sys.getrefcount(storage) <= _NAMES

    def _lie_there(self) -> bool:
        return all(_place_of(parameter) == place for parameter, place in self._places)

    def _try_out(self) -> None:
        """Raises NotShared unless the system tells which pages were written."""
        was = self.is_written()
        for own in self._ranges.values():
            own.touch(1)
        found = self.is_written()
        self.restore()
        if was or not found or self.is_written():
            raise NotShared("this system does not tell which pages of a process were written.")

    def __del__(self) -> None:
        if self._pages >= 0:
            os.close(self._pages)


class _Range:
    """The pages of one table's values, float32 [size]."""

    def __init__(self, size: int) -> None:
        self._bytes = max(1, -(-4 * size // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._whole = np.frombuffer(mmap.mmap(-1, self._bytes), np.uint8)
        self._at = int(self._whole.__array_interface__["data"][0])
        self.values = self._whole[: 4 * size].view(np.float32)
        self._entries = np.zeros(self._bytes // mmap.PAGESIZE, np.uint64)
        self._entry_bytes = memoryview(self._entries).cast("B")  # type: ignore[arg-type]
        self._file: NDArray[np.uint8] | None = None  # the server's memory, while this range may follow it

    def attach(self, place: Mapping[str, Any]) -> None:
        size = place.get("bytes")
        if type(size) is not int or size < self._bytes or size % mmap.PAGESIZE:
            raise NotShared(f"the server offers {size!r} bytes for values of {self._bytes}.")
        fd = open_memory(place, size, writes=False)
        try:
            # Noted first: where a signal comes in between, the pages are taken for the server's, and are copied.
            self._file = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
            _map_over(self._at, self._bytes, fd)
        finally:
            os.close(fd)

    @property
    def given(self) -> Rows | None:
        """The server's values, while this range may follow them."""
        return None if self._file is None else self._file[: self.values.nbytes].view(np.float32)

    def touch(self, pages: int | None = None) -> None:
        """Makes the first ``pages`` pages copies, all by default; their values stay."""
        self._whole[:: mmap.PAGESIZE][:pages] |= 0

    def detach(self) -> None:
        if self._file is not None:
            self.copy_pages()
            self._file = None

    def copy_pages(self) -> None:
        """Makes all pages copies, with the values of one step unless the server stopped while it changed them."""
        if self._file is None:
            return
        count = count_in(self._file)
        end = time.monotonic() + _PATIENCE_S
        while True:
            before = int(count[0])
            if before % 2 == 0:
                self.touch()
                if before == int(count[0]):
                    return
                self.restore()
            if time.monotonic() > end:
                self.touch()
                warnings.warn(
                    "The parameter server was stopped while it changed the dense parameters: those of this worker are "
                    "partly of one step and partly of the next, until step() or fleet.load_model() replaces them.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            time.sleep(0.0001)

    def is_written(self, pages: int) -> bool:
        os.preadv(pages, [self._entry_bytes], self._at // mmap.PAGESIZE * _ENTRY_BYTES)
        bits = self._entries >> np.uint64(_FILE_BIT)
        return bool(((bits > 0) & (bits & np.uint64(1) == 0)).any())

    def restore(self) -> None:
        if _libc().madvise(self._at, self._bytes, _DONT_NEED):  # the process has locked its pages in memory
            assert self.given is not None
            self.values[:] = self.given


_DONT_NEED = 4
_MAP_FIXED = 16


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _map_over(at: int, size: int, fd: int) -> None:
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc().mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != at:
        raise OSError(ctypes.get_errno(), "mmap")


def _num_faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def _place_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.data_ptr(), parameter.shape, parameter.stride()


def _before_fork() -> None:
    _changing.acquire()
    for mapped in list(_living):
        mapped.copy_pages()


os.register_at_fork(before=_before_fork, after_in_parent=_changing.release, after_in_child=_changing.release)
