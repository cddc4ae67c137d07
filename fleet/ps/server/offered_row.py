"""OfferedRow: memory in which one dense table lies and from which workers of this machine read its values.

[Note: Values that workers read where they lie]
In sync mode the values of the dense parameters change once a step, while every worker waits for that step. So a worker
that shares memory with its only server needs no copy of them: it maps the table's memory over its parameters
(:mod:`fleet.ps.worker.mapped_parameters`), and the answer to its push says no more than that the step is applied.

A worker reads them at any time but one: from its push of a step until the answer. Therefore the table changes where it
lies only by a step that each of its readers has pushed and waits for. Before any other change it leaves this memory,
which never changes again, and goes on in memory of its own: a load, values that are set, a step that the others take
while a worker stands at a barrier, was silent for longer than its lease, has lost its connection or is replaced. What
reads the old memory has the values of its last step, whole. The answer to the next push of such a worker brings the
values, and then it asks for memory again.

A reader is a connection; it stays one when it is cut, because the process at its other end may go on to read.
``count`` in the last 8 bytes is odd while the values change: a worker that stops waiting, as after Ctrl-C, and goes on
with a copy of what it mapped waits until it is even.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from fleet.ps.wire.memory_file import COUNT_BYTES, NotShared, count_in, make_memory


class TableReader:
    """A connection of a worker that reads tables where they lie.

    Attributes:
        waits_for: the last step that it has pushed to wait for its values.
    """

    def __init__(self) -> None:
        self.waits_for = 0


class OfferedRow:
    """Memory for float32 ``row`` [length], zeros at first.

    Raises:
        NotShared: there is none.
    """

    _fd = -1

    def __init__(self, length: int) -> None:
        size = -(-(4 * length + COUNT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd, place = make_memory(size)
        self.place: dict[str, Any] = {**place, "bytes": size}
        try:
            whole = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)
        except (OSError, ValueError) as error:
            self.close()
            raise NotShared(f"no memory to share: {error}.") from None
        self.row = whole[: 4 * length].view(np.float32)
        self._count = count_in(whole)
        self.readers: set[TableReader] = set()

    def may_change(self, step: int) -> bool:
        """Returns whether every reader waits for ``step``, which is to change the values; 0: for no other change."""
        return all(step and reader.waits_for == step for reader in list(self.readers))

    def begin(self) -> None:
        """Says that the values are about to change."""
        self._count += 1

    def end(self) -> None:
        """Says that they have changed."""
        self._count += 1

    def close(self) -> None:
        """Makes the memory unreachable for processes that have not opened it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
