"""A table as the server sees it: requests are checked against it, and a snapshot of it can be written and read.

``order`` is held while a change is journaled and applied, so that a replay changes the rows in the same order. Each
table has one; pulls do not take it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet.common.plain_files import create
from fleet.errors import CheckpointError, ConfigError, PSError
from fleet.ps.files.chunks import END_BYTES, read_chunks, read_end, write_chunk, write_end
from fleet.ps.files.row_file import encode_block, open_plain, read_block
from fleet.ps.server.job_state import Refused
from fleet.ps.server.mean_parts import MeanPart, merge_parts
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.kernels.numba_cache import naming_the_cause
from fleet.ps.table.sparse_table import SparseTable
from fleet.ps.table.table_group import TableGroup
from fleet.ps.table.table_spec import config_of_spec
from fleet.ps.wire.messages import TablePart, each_table

Table = TypeVar("Table", bound=SparseTable | DenseTable)
ServedTable: TypeAlias = "ServedSparse | ServedDense"

_LONGEST_DAY = 256


class Stamps:
    """The last record that each restored row holds; rows that were not in the snapshot hold none."""

    def __init__(self) -> None:
        self.latest = 0
        self._keys: list[NDArray[np.int64]] = []
        self._stamps: list[NDArray[np.int64]] = []
        self._sorted: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def add(self, keys: NDArray[np.int64], stamp: int) -> None:
        """Notes that ``keys`` hold every record up to ``stamp``."""
        self.latest = max(self.latest, stamp)
        self._keys.append(keys)
        self._stamps.append(np.full(len(keys), stamp, np.int64))
        self._sorted = None

    def newer(self, keys: NDArray[np.int64], lsn: int) -> NDArray[np.bool_] | None:
        """Returns which of ``keys`` do not hold record ``lsn`` yet; None stands for all of them."""
        if lsn > self.latest:
            return None
        if self._sorted is None:
            everything = np.concatenate(self._keys) if self._keys else np.empty(0, np.int64)
            order = np.argsort(everything, kind="stable")
            stamps = np.concatenate(self._stamps) if self._stamps else everything
            self._sorted = everything[order], stamps[order]
        known, stamps = self._sorted
        if not len(known):
            return None
        # A key above the last known one would otherwise get a place behind the end.
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        newer: NDArray[np.bool_] = (known[place] != keys) | (stamps[place] < lsn)
        return newer


def missing_parts(parts: Sequence[TablePart], stamps: Mapping[int, Stamps], lsn: int) -> list[TablePart]:
    """Returns the rows of ``parts`` that do not hold record ``lsn`` yet."""
    missing = []
    for part in parts if not stamps else each_table(parts):
        known = stamps.get(part.table_id)
        if known is None or lsn > known.latest:
            missing.append(part)
        elif part.ids is not None and (keep := known.newer(part.ids, lsn)) is not None:
            missing.append(part.picked(part.table_id, np.flatnonzero(keep)))
    return missing


def make_served_table(spec: Mapping[str, Any], folder: Path | None = None) -> ServedTable:
    """Returns an empty table of ``spec`` with all its kernels; its rows on disk lie in ``folder``."""
    config = config_of_spec(spec)
    if isinstance(config, DenseTableConfig):
        dense = DenseTable(config)
        dense.load_kernels()
        return ServedDense(dense)
    table = SparseTable(config, folder)
    table.load_kernels()
    # Merging has a kernel as well, which must be loaded while files can be opened, see SparseTable.load_kernels.
    with naming_the_cause():
        merge_parts([TablePart(0, 1, 1, np.zeros(1, np.int64), np.zeros((1, 1), np.float32))], 1)
    return ServedSparse(table)


class _Served(Generic[Table]):
    """What the server keeps beside every table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.gate = table.gate
        self.order = threading.Lock()
        self.learning_rate: float | None = None  # the rate it was set to; None while the configuration's applies

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the next push."""
        self.table.learning_rate = value
        self.learning_rate = value


class ServedSparse(_Served[SparseTable]):
    """A :class:`SparseTable` behind the server."""

    group_of = TableGroup  # serves several such tables at once

    def __init__(self, table: SparseTable) -> None:
        super().__init__(table)
        self.day: str | None = None  # the last day that advance_day named
        self.keeps_shows = table.config.accessor is not None
        self.is_limited = table.config.bounds is not None
        self.evicted = 0

    def check(self, part: TablePart, change: bool) -> None:
        """Raises :class:`Refused` when ``part`` does not fit the table."""
        self.check_form(part, change)
        if change:
            self.make_room(part.n)

    def check_form(self, part: TablePart, change: bool) -> None:
        """Raises :class:`Refused` when ``part`` has other fields, or rows of another width, than the table."""
        dim = self.table.layout.num_weights if change else self.table.config.dim
        name = self.table.config.name
        if part.ids is None:
            raise Refused(f"table {name!r} is sparse; the message has no ids for it.")
        if part.dim != dim:
            raise Refused(f"table {name!r} takes rows of dim {dim}; the message has {part.dim}.")
        if change and part.rows is None:
            raise Refused(f"table {name!r}: the message has ids and no rows.")

    def make_room(self, num_rows: int) -> None:
        """Raises :class:`Refused` when ``num_rows`` more rows have no room on the disk.

        So it is before the journal has the change: it is refused while nothing has happened yet.
        """
        try:
            self.table.make_room(num_rows)
        except PSError as error:
            raise Refused(str(error)) from None

    def pull_shape(self, part: TablePart) -> tuple[int, int]:
        """Returns the shape of the rows that a pull of ``part`` gives."""
        return part.n, self.table.config.dim

    def pull(self, part: TablePart, out: NDArray[np.float32], drawn: bool) -> None:
        """Writes the rows of ``part`` to ``out``; ids without one get initial weights, or zeros without ``drawn``."""
        assert part.ids is not None
        self.table.pull(part.ids, out, create=drawn)

    def push(self, part: TablePart, lsn: int = 0) -> None:
        """Applies a gradient, which is record ``lsn``; the caller asks for the :meth:`victims` then."""
        assert part.ids is not None
        assert part.rows is not None
        self.table.push(part.ids, part.rows, part.shows, part.clicks, part.slots, tick=lsn)

    def add(self, part: TablePart, lsn: int = 0) -> None:
        """Adds deltas, which are record ``lsn``; the caller asks for the :meth:`victims` then."""
        assert part.ids is not None
        assert part.rows is not None
        self.table.add(part.ids, part.rows, tick=lsn)

    def victims(self) -> NDArray[np.int64]:
        """Returns the ids whose rows a table above its limit must lose."""
        return self.table.victims()

    def erase(self, part: TablePart) -> None:
        """Deletes the rows of ``part.ids``."""
        assert part.ids is not None
        self.evicted += self.table.erase(part.ids)

    def set_values(self, part: TablePart) -> None:
        """Not possible for rows: only loading sets them."""
        raise AssertionError("the request was checked")

    def alter(self, action: str, fields: dict[str, Any]) -> int:
        """Shrinks, ages, clears, or sets the learning rate."""
        if action == "shrink":
            return self.table.shrink(fields.get("threshold"), fields.get("max_unseen_days"))
        if action == "advance_day":
            self._begin_day(fields.get("day"))
        elif action == "clear":
            self.table.clear()
        elif action == "learning_rate":
            self.set_learning_rate(float(fields["value"]))
        else:
            raise Refused(f"{action!r} is not an action of sparse tables.")
        return self.table.num_rows

    def _begin_day(self, day: object) -> None:
        """Advances the day, unless it has the name of the last one: a restarted worker may name it again."""
        if day is not None and not (isinstance(day, str) and len(day) <= _LONGEST_DAY):
            raise Refused(f"a day is a string of at most {_LONGEST_DAY} characters, received {str(day)[:80]!r}.")
        if day is None or day != self.day:
            self.table.advance_day()
            self.day = day

    def describe(self) -> dict[str, Any]:
        """Returns facts for the status operation."""
        asked, found = self.table.pull_counts
        return {
            "rows": self.table.num_rows,
            "bytes": self.table.memory_bytes,
            "evicted": self.evicted,
            "asked": asked,
            "found": found,
        }

    def write(self, path: Path, stamp: Callable[[], int]) -> None:
        """Writes a snapshot, chunk by chunk, while training continues."""
        with create(path, 0o600) as file:
            for block in self.table.blocks(stamp=stamp):
                file.write(encode_block(block))
            write_end(file)

    def read(self, path: Path) -> Stamps:
        """Fills the empty table from a snapshot."""
        stamps = Stamps()
        with open_plain(path) as file:
            end = path.stat().st_size - END_BYTES
            while file.tell() < end:
                block = read_block(file, path)
                self.table.insert(block, evict=False)  # the journal says which rows went
                stamps.add(block.keys, block.stamp)
            read_end(file, path)
        return stamps


class ServedDense(_Served[DenseTable]):
    """A :class:`DenseTable` behind the server."""

    keeps_shows = False
    is_limited = False

    def check(self, part: TablePart, change: bool) -> None:
        """Raises :class:`Refused` when ``part`` does not fit the table."""
        name = self.table.config.name
        size = self.table.config.size
        if part.ids is not None:
            raise Refused(f"table {name!r} is dense; the message has ids for it.")
        if part.n != size or part.offset:
            raise Refused(
                f"table {name!r} has {size} elements here; the message has {part.n} from {part.offset}. Worker and "
                "server must be built from the same model."
            )
        if change and part.rows is None:
            raise Refused(f"table {name!r}: the message has no values for it.")

    def pull_shape(self, part: TablePart) -> tuple[int, int]:
        """Returns the shape of the values."""
        return part.n, 1

    def pull(self, part: TablePart, out: NDArray[np.float32], drawn: bool) -> None:
        """Writes the values to ``out``."""
        self.table.pull(out.reshape(-1))

    def push(self, part: TablePart, lsn: int = 0) -> None:
        """Applies a gradient."""
        if isinstance(part, MeanPart):
            self.table.push_mean(part.gradients, part.divisor)
            return
        assert part.rows is not None
        self.table.push(part.rows.reshape(-1))

    def add(self, part: TablePart, lsn: int = 0) -> None:
        """Adds deltas."""
        assert part.rows is not None
        self.table.add(part.rows.reshape(-1))

    def victims(self) -> NDArray[np.int64]:
        """Returns none: a dense table has a fixed size."""
        return np.empty(0, np.int64)

    def erase(self, part: TablePart) -> None:
        """Not possible for dense values."""
        raise AssertionError("a dense table has no victims")

    def set_values(self, part: TablePart) -> None:
        """Replaces the values."""
        assert part.rows is not None
        self.table.set_values(part.rows.reshape(-1))

    def alter(self, action: str, fields: dict[str, Any]) -> int:
        """Sets the learning rate."""
        if action != "learning_rate":
            raise Refused(f"{action!r} is not an action of dense tables.")
        self.set_learning_rate(float(fields["value"]))
        return self.table.config.size

    def describe(self) -> dict[str, Any]:
        """Returns facts for the status operation."""
        size = self.table.config.size
        return {"rows": size, "bytes": 4 * size, "is_set": self.table.is_set or not size}

    def write(self, path: Path, stamp: Callable[[], int]) -> None:
        """Writes a snapshot: one chunk."""
        with self.gate.exclusive():
            # Pushes hold the shared side of the gate around record and change, so the stamp belongs to exactly these
            # values.
            values, state = self.table.read_state()
            number = stamp()
        with create(path, 0o600) as file:
            payload = values.tobytes() + state.tobytes()
            write_chunk(file, len(values), number, len(state), 0, payload)
            write_end(file)

    def read(self, path: Path) -> Stamps:
        """Fills the table from a snapshot."""
        stamps = Stamps()
        with open_plain(path) as file:
            for n, number, state, _, payload in read_chunks(file, path):
                array = np.frombuffer(payload, np.float32).copy()
                if len(array) != n + state:
                    raise CheckpointError(f"{path}: {len(array)} values instead of {n + state}.")
                try:
                    self.table.set_state(array[:n], array[n:])
                except ConfigError as error:
                    raise CheckpointError(f"{path}: {error}") from None
                stamps.latest = number
        return stamps
