"""LocalState: the rows that files of this machine hold at one moment, by table and server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.errors import CheckpointError, ConfigError, did_you_mean
from fleet.ps.serving.mapped_rows import MappedRows
from fleet.ps.serving.row_index import GONE, MISSING, RowIndex, merged
from fleet.ps.table.hash import Uint64s, mix
from fleet.ps.table.layout import Float32s, Int64s

Found = tuple[Float32s, NDArray[np.bool_]]
_OFFSET_BITS = 40  # of a place: which file, above the byte in it
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


@dataclass(frozen=True, slots=True)
class TableShare:
    """The rows of one table on one server: a base and what came after it. A newer share is another object.

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
        while len(rest) > 1 and 2 * len(newest) >= len(rest[0]):  # each is smaller than half of the next: few of them
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
    """What all servers' files hold at one moment; lookups of it see nothing newer.

    Attributes:
        dims: the columns of each table.
        shares: the rows, by table and server.
        positions: how far each server's are.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[tuple[str, int], TableShare] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)

    def lookup(self, table: str, keys: Int64s) -> Found:
        """Returns the rows of ``keys``, zeros where there is none, and which were found."""
        out = np.zeros((len(keys), self.dims[table]), np.float32)
        found = np.zeros(len(keys), np.bool_)
        hashes = mix(keys)
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


def check_table(source: str, table: object, dims: Mapping[str, int]) -> str:
    """Returns ``table``; raises :class:`ConfigError` unless it is one of the tables."""
    if not isinstance(table, str) or table not in dims:
        raise ConfigError(
            f"reader.lookup({table!r}, ...): {source} has no such table.{did_you_mean(str(table), dims)} It has "
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
