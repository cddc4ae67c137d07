"""Samples: many samples in columns, one per slot, and their serialised form.

[Note: Columns]
A column is one array of values and the offsets at which each sample's values begin. Samples are never moved one by
one: a shuffle permutes a list of indices, and a batch gathers from the columns. Ids and contents of samples are
columns of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ConfigError
from fleet.ps.table.kernels.numba_cache import load_kernels

Ints: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[Any]

_HEAD = struct.Struct("<4sIQ")  # magic, columns, samples
_SIZE = struct.Struct("<Q")
_MAGIC = b"FLSM"


@dataclass(frozen=True, eq=False)
class Column:
    """The values of one slot: ``values[offsets[i]:offsets[i + 1]]`` belong to sample i; int64, float32 or uint8."""

    values: Values
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def gather(self, places: Ints) -> Column:
        """Returns the column for the samples at ``places``."""
        starts = self.offsets[places]
        lengths = self.offsets[places + 1] - starts
        offsets = np.zeros(len(places) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        values = np.empty(int(offsets[-1]), self.values.dtype)
        load_kernels("kernels", "fleet.dataset", "datasets").copy_runs(self.values, starts, offsets, values)
        return Column(values, offsets)

    def part(self, start: int, stop: int) -> Column:
        """Returns the column for the samples from ``start`` to ``stop``, without copying the values."""
        offsets = self.offsets[start : stop + 1]
        return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def octets(self) -> list[bytes]:
        """Returns the bytes of each sample, for a column of bytes."""
        data = self.values.tobytes()
        return [data[start:stop] for start, stop in pairwise(self.offsets.tolist())]

    def texts(self) -> list[str]:
        """Returns a column of bytes as strings, one for each sample."""
        return [text.decode("utf-8", "replace") for text in self.octets()]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in columns, all of the same length."""

    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def gather(self, places: Ints) -> Samples:
        """Returns the samples at ``places``, in that order."""
        return Samples(tuple(column.gather(places) for column in self.columns))

    def part(self, start: int, stop: int) -> Samples:
        """Returns the samples from ``start`` to ``stop``."""
        return Samples(tuple(column.part(start, stop) for column in self.columns))

    @staticmethod
    def joined(blocks: Sequence[Samples]) -> Samples:
        """Concatenates the samples of all blocks, which have the same columns."""
        if len(blocks) == 1:
            return blocks[0]
        columns = []
        # Column by column, each into one array: the blocks of a file are many, and joining them in turn copies again.
        for parts in zip(*(block.columns for block in blocks), strict=True):
            offsets = np.zeros(sum(map(len, parts)) + 1, np.int64)
            at = 1
            base = 0
            for part in parts:
                np.add(part.offsets[1:], base, out=offsets[at : at + len(part)])
                at += len(part)
                base += int(part.offsets[-1])
            columns.append(Column(np.concatenate([part.values for part in parts]), offsets))
        return Samples(tuple(columns))

    def to_bytes(self) -> bytes:
        """Returns the samples as bytes: a header, then lengths (uint32) and values of each column, little endian."""
        parts = [_HEAD.pack(_MAGIC, len(self.columns), len(self))]
        for column in self.columns:
            little = column.values.dtype.newbyteorder("<")
            lengths = np.diff(column.offsets).astype("<u4")
            parts += [_SIZE.pack(len(column.values)), lengths.tobytes(), column.values.astype(little).tobytes()]
        return b"".join(parts)


def empty_samples(dtypes: Sequence[np.dtype[Any]]) -> Samples:
    """Returns no samples, in columns of these dtypes."""
    return Samples(tuple(Column(np.empty(0, dtype), np.zeros(1, np.int64)) for dtype in dtypes))


def samples_from_bytes(data: bytes | memoryview, dtypes: Sequence[np.dtype[Any]]) -> Samples:
    """Returns the samples that :meth:`Samples.to_bytes` wrote; every length is checked before it is used.

    Raises:
        ConfigError: the bytes are not samples with columns of these dtypes.
    """
    # Nothing here trusts a length: the bytes come from another worker, which may run another version.
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise ConfigError(
            f"samples of another worker: {len(view)} bytes are not a header. Run the same version everywhere."
        )
    magic, num_columns, count = _HEAD.unpack_from(view)
    if magic != _MAGIC or num_columns != len(dtypes):
        raise ConfigError("samples of another worker have different slots. Give every worker the same use_var.")
    at = _HEAD.size
    columns = []
    for dtype in dtypes:
        if len(view) - at < _SIZE.size + 4 * count:
            raise ConfigError("samples of another worker end too early; nothing was loaded.")
        (size,) = _SIZE.unpack_from(view, at)
        lengths = np.frombuffer(view, "<u4", count, at + _SIZE.size)
        at += _SIZE.size + 4 * count
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if int(offsets[-1]) != size or len(view) - at < size * dtype.itemsize:
            raise ConfigError("samples of another worker: lengths and values do not match; nothing was loaded.")
        values = np.frombuffer(view, dtype.newbyteorder("<"), size, at).astype(dtype)
        at += size * dtype.itemsize
        columns.append(Column(values, offsets))
    if at != len(view):
        raise ConfigError(f"samples of another worker: {len(view) - at} bytes too many; nothing was loaded.")
    return Samples(tuple(columns))
