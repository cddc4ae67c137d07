"""LocalState: the rows that files of this machine hold at one moment, by table and server.

Files are mapped into memory: the system reads and drops their pages as they are needed. An index in numpy alone says
where a row is, so a serving process need not compile.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.errors import CheckpointError, ConfigError, did_you_mean
from fleet.ps.files.row_file import open_plain
from fleet.ps.publishing.delta import STORED, decode
from fleet.ps.publishing.versions import Version
from fleet.ps.table.hash import Uint64s, mix
from fleet.ps.table.layout import Float32s, Int64s

Octets = NDArray[np.uint8]
Found = tuple[Float32s, NDArray[np.bool_]]
MISSING = -1  # an id that an index does not know
GONE = -2  # an id that it knows to be deleted
_OFFSET_BITS = 40  # a place is the number of the file, above the byte in it
_OFFSET = (1 << _OFFSET_BITS) - 1


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader's rows of one server are.

    Attributes:
        history: identity of the server's journal; of a full save, the save's.
        watermark: the journal record up to which the rows are complete; of a full save 0.
        step: sync mode: the last step that the rows hold; otherwise the lowest clock of the workers.
        pushed_at: when the oldest change of the newest delta was pushed, unix time in seconds; 0 of a full save.
    """

    history: str
    watermark: int
    step: int = 0
    pushed_at: float = 0.0


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
        scales: of int8 rows, which follow each other from the first byte on: one float32 for each.
    """

    def __init__(self, octets: Octets, dim: int, encoding: str = "float32", scales: Float32s | None = None) -> None:
        self.dim = dim
        self._dtype = STORED[encoding]
        self._width = dim * self._dtype.itemsize
        self._scales = scales
        # One item at every byte: numpy copies an item of any address, so rows need not be aligned in the file.
        self._items = np.ndarray(
            (max(0, len(octets) - self._width + 1),), np.dtype(f"V{self._width}"), octets, strides=(1,)
        )

    def rows(self, offsets: Int64s) -> Float32s:
        """Returns the rows that begin at these bytes, float32 [n, dim]."""
        stored = self._items[offsets].view(self._dtype).reshape(len(offsets), self.dim)
        scales = None if self._scales is None else self._scales[offsets // self._width]
        return decode(stored, scales)


class RowIndex:
    """The places of distinct ids; never changed once it is made, so any thread may read it.

    Ids lie in the order of their hashes, which are evenly spread: the upper bits of a hash lead to its bucket, which
    holds about one id. It takes 20 bytes an id.

    Args:
        keys: int64 [n]. Of an id that occurs twice the first counts.
        places: int64 [n]; 0 or more, or :data:`GONE`.

    Example:
        >>> index = RowIndex(np.array([7, -3]), np.array([0, 64]))
        >>> ids = np.array([-3, 5])
        >>> index.find(ids, mix(ids)).tolist()
        [64, -1]
    """

    __slots__ = ("_bits", "_starts", "keys", "places")

    def __init__(self, keys: Int64s, places: Int64s) -> None:
        hashes = mix(keys)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        first = np.ones(len(order), np.bool_)
        first[1:] = hashes[1:] != hashes[:-1]  # equal hashes are equal ids
        if not first.all():
            order = order[first]
            hashes = hashes[first]
        self.keys: Int64s = keys[order]
        self.places: Int64s = places[order]
        self._bits = max(1, (len(order) - 1).bit_length())
        counts = np.bincount((hashes >> np.uint64(64 - self._bits)).astype(np.int64), minlength=1 << self._bits)
        self._starts: NDArray[np.unsignedinteger] = np.zeros(
            len(counts) + 1, np.uint32 if len(order) < 2**32 else np.uint64
        )
        np.cumsum(counts, out=self._starts[1:])

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, keys: Int64s, hashes: Uint64s) -> Int64s:
        """Returns the place of each id, int64 [n]; ``hashes`` is ``mix(keys)``."""
        places = np.full(len(keys), MISSING, np.int64)
        if not len(self.keys):
            return places
        buckets = (hashes >> np.uint64(64 - self._bits)).astype(np.int64)
        at = self._starts[buckets].astype(np.int64)
        ends = self._starts[buckets + 1].astype(np.int64)
        left = np.flatnonzero(at < ends)
        at, ends, wanted = at[left], ends[left], keys[left]
        while len(left):  # as often as the fullest bucket that is asked for has ids
            same = self.keys[at] == wanted
            places[left[same]] = self.places[at[same]]
            on = ~same
            on &= at + 1 < ends
            at, ends, wanted, left = at[on] + 1, ends[on], wanted[on], left[on]
        return places


def merged(newer: RowIndex, older: RowIndex) -> RowIndex:
    """Returns one index of the ids of both; the newer one's place counts."""
    return RowIndex(np.concatenate([newer.keys, older.keys]), np.concatenate([newer.places, older.places]))


@dataclass(frozen=True, slots=True)
class TableShare:
    """The rows of one table on one server: a base and the deltas after it. A newer share is another object.

    ``indexes`` are newest first, the base last; their places name a file of ``files`` and a byte in it.
    """

    indexes: tuple[RowIndex, ...] = ()
    files: tuple[MappedRows, ...] = ()

    def extended(self, keys: Int64s, offsets: Int64s, rows: MappedRows, deleted: Int64s | None = None) -> TableShare:
        """Returns this share after a change: rows of ``keys`` at ``offsets`` of file ``rows``, and ``deleted`` gone."""
        if len(offsets) and int(offsets.max()) > _OFFSET:
            raise CheckpointError(f"a file of rows has more than {_OFFSET:,} bytes; save with more servers.")
        places = offsets + (len(self.files) << _OFFSET_BITS)
        if deleted is not None and len(deleted):
            keys = np.concatenate([keys, deleted])
            places = np.concatenate([places, np.full(len(deleted), GONE, np.int64)])
        newest = RowIndex(keys, places)
        rest = list(self.indexes)
        # Each index stays smaller than half of the next: a lookup meets few, and few deltas cause a merge.
        while len(rest) > 1 and 2 * len(newest) >= len(rest[0]):
            newest = merged(newest, rest.pop(0))
        return TableShare((newest, *rest), (*self.files, rows))

    def find(self, keys: Int64s, hashes: Uint64s) -> Int64s:
        """Returns the place of each id, below 0 where there is no row."""
        places = self.indexes[0].find(keys, hashes) if self.indexes else np.full(len(keys), MISSING, np.int64)
        for index in self.indexes[1:]:
            left = np.flatnonzero(places == MISSING)
            if not len(left):
                break
            places[left] = index.find(keys[left], hashes[left])
        return places

    def put(self, places: Int64s, out: Float32s, where: Int64s) -> None:
        """Writes the rows at ``places`` to the lines ``where`` of ``out``."""
        numbers = places >> _OFFSET_BITS
        offsets = places & _OFFSET
        used = np.unique(numbers).tolist()
        for number in used:
            if len(used) == 1:
                out[where] = self.files[number].rows(offsets)
            else:
                these = numbers == number
                out[where[these]] = self.files[number].rows(offsets[these])


@dataclass(frozen=True, slots=True)
class LocalState:
    """The rows in all servers' files at one moment; its lookups see nothing newer.

    Attributes:
        dims: the columns of each table.
        shares: the rows, by table and server.
        positions: how far each server's are.
        version: the version that these rows are; None: the newest.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[tuple[str, int], TableShare] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)
    version: Version | None = None

    def lookup(self, table: str, keys: Int64s) -> Found:
        """Returns the rows of ``keys``, zeros for missing rows, and the mask of those found."""
        out = np.zeros((len(keys), self.dims[table]), np.float32)
        found = np.zeros(len(keys), np.bool_)
        hashes = mix(keys)
        # Every server's share is asked, whatever the routing: a folder may hold saves of any number of servers.
        left = np.arange(len(keys))
        for (name, _), share in self.shares.items():
            if name != table or not len(left):
                continue
            every = len(left) == len(keys)
            places = share.find(keys, hashes) if every else share.find(keys[left], hashes[left])
            here = places >= 0
            where = left[here]
            if len(where):
                share.put(places[here], out, where)
                found[where] = True
            left = left[~here]
        return out, found


class FolderRows:
    """The rows of a folder, loaded by ``refresh``; one without a publisher has neither versions nor a brake."""

    state = LocalState()

    def refresh(self) -> bool:
        """Returns whether there is another state than before."""
        raise NotImplementedError

    def versions(self) -> list[Version]:
        """Returns the versions, oldest first."""
        return []

    def must_turn(self) -> bool:
        """Returns whether a brake was pulled or released since the last refresh."""
        return False

    def turn(self) -> None:
        """Puts the rows that a brake asks for in place, if they are ready."""

    def read_ahead(self) -> None:
        """Reads what a brake may ask for."""

    def program_of(self, version: Version) -> Path | None:
        """Returns the folder of the program that was marked with ``version``."""
        return None


def check_table(source: str, table: object, dims: Mapping[str, int], call: str = "lookup") -> str:
    """Returns ``table``; raises :class:`ConfigError` unless it is one of the tables."""
    if not isinstance(table, str) or table not in dims:
        raise ConfigError(
            f"reader.{call}({table!r}, ...): {source} has no such table.{did_you_mean(str(table), dims)} It has "
            f"{', '.join(map(repr, sorted(dims))) or 'none yet'}."
        )
    return table


def check_servers(source: str, present: Collection[int], count: int) -> None:
    """Raises :class:`ConfigError` unless all of the ``count`` servers of the job have written their rows."""
    if len(present) < count:
        raise ConfigError(
            f"{source}: of the job's {count} servers only those of number {sorted(present)} have written rows; the ids "
            "of the others would read as zeros. They write within seconds while the job runs: try again then."
        )
