"""Rows in a file that is mapped into memory: the system reads and drops its pages as they are needed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.errors import CheckpointError
from fleet.ps.files.row_file import open_plain
from fleet.ps.publishing.delta import decode, row_bytes
from fleet.ps.table.layout import Float32s, Int64s

Octets = NDArray[np.uint8]
_DTYPES = {"float32": "<f4", "bfloat16": "<u2", "int8": "i1"}


def map_file(path: Path) -> Octets:
    """Returns the bytes of the file at ``path``, mapped; they stay readable when the file is removed.

    Raises:
        CheckpointError: it is absent, a link, or no regular file.
    """
    with open_plain(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return np.empty(0, np.uint8)
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be mapped into memory: {error.strerror}.") from None
    return np.frombuffer(mapped, np.uint8)


class MappedRows:
    """Rows of one table in one file.

    Args:
        octets: the file, or any bytes.
        dim: columns of a row.
        encoding: how a row is stored: one of :data:`fleet.ps.publishing.delta.ENCODINGS`.
        start: int8: where the first row begins; rows follow each other, and ``scales`` has one float32 for each.
        scales: of int8 rows.
    """

    def __init__(
        self, octets: Octets, dim: int, encoding: str = "float32", start: int = 0, scales: Float32s | None = None
    ) -> None:
        self.dim = dim
        self._dtype = np.dtype(_DTYPES[encoding])
        self._width = row_bytes(dim, encoding) - (4 if encoding == "int8" else 0)
        self._start = start
        self._scales = scales
        # One item at every byte: numpy copies an item of any address, so rows need not be aligned in the file.
        self._items = np.ndarray(
            (max(0, len(octets) - self._width + 1),), np.dtype(f"V{self._width}"), octets, strides=(1,)
        )

    def rows(self, offsets: Int64s) -> Float32s:
        """Returns the rows that begin at these bytes, float32 [n, dim]."""
        stored = self._items[offsets].view(self._dtype).reshape(len(offsets), self.dim)
        scales = None if self._scales is None else self._scales[(offsets - self._start) // self._width]
        return decode(stored, scales)
