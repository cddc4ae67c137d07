"""SparseTable: id to row for ids without bound; the first push of an id makes its row.

Safe for any number of threads: a table is 64 sub-shards with a lock each, and the kernels run without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigError, PSError
from fleet.ps.table.eviction import loaded_ranks
from fleet.ps.table.gate import Gate
from fleet.ps.table.kernels.numba_cache import address_of, load_kernels, naming_the_cause
from fleet.ps.table.layout import PENDING, PENDING_COUNT, Float32s, Int64s, RowLayout, SparseTableConfig
from fleet.ps.table.rows import MAX_ROW_COUNT, RowBlock, Statistics, Window
from fleet.ps.table.rules import FLOAT32_MAX
from fleet.ps.table.save_chain import SaveChain

ROWS_PER_WINDOW = 8192
_PLACES = 2**32  # of an index, whatever its length: a window is a span of them
_STATISTICS = np.dtype([("show", "<f8"), ("click", "<f8"), ("delta", "<f4"), ("slot", "<u4")])


class SparseTable:
    """The rows of one sparse table on this server.

    Args:
        config: of the table.
        folder: where rows on disk lie, see [Note: Rows on disk]; only a table with ``rows="disk"`` uses it.

    Raises:
        ConfigError: the limits do not fit the rows, a table on disk has no folder, or numba is broken or
            disabled, so that the table's kernels cannot be compiled.

    Example:
        >>> table = SparseTable(SparseTableConfig("ads", dim=8))
        >>> keys = np.array([7, -3], np.int64)
        >>> weights = table.pull(keys)                            # those that their rows will begin with
        >>> table.push(keys, np.ones((2, 8), np.float32))         # makes the rows; a gradient per distinct key
        >>> table.num_rows
        2
    """

    def __init__(self, config: SparseTableConfig, folder: Path | None = None) -> None:
        self.config = config
        self.gate = Gate()
        # Not at the import of this module: a process that only plans tables needs no numba.
        kernels = load_kernels("table_memory", "fleet.ps.table")
        self._requests = kernels.row_requests
        self._walks = kernels.walks
        self._finding = kernels.finding
        with naming_the_cause():
            self._memory = kernels.TableMemory(config, folder)
        self._learning_rate: float | None = None
        self.chain = SaveChain()
        self.on_delete: Callable[[Int64s], None] | None = None  # called with keys whose rows are deleted

    # -- requests ------------------------------------------------------------------------------------------------

    def pull(self, keys: Int64s, out: Float32s | None = None, *, create: bool = True) -> Float32s:
        """Returns the rows of ``keys`` as float32 [n, dim], written to ``out`` where given.

        A pull makes no row. A key without one reads as the weights that its first push will begin with if ``create``
        is True, the table's ``create_on`` is ``"pull"`` and the entry policy admits it at that push; otherwise as
        zeros. Repeated keys are allowed.

        Raises:
            ConfigError: keys are not int64 of one dimension, or ``out`` does not fit.
        """
        keys = _check_keys("pull", keys)
        shape = (len(keys), self.config.dim)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ConfigError(
                f"pull from table {self.config.name!r}: out is {out.dtype} {out.shape}; it takes a "
                f"writable C-contiguous float32 array of shape {shape}."
            )
        self._pull(keys, out, create)
        return out

    def push(
        self,
        keys: Int64s,
        gradients: Float32s,
        shows: Float32s | None = None,
        clicks: Float32s | None = None,
        slots: npt.NDArray[np.uint32] | None = None,
        *,
        tick: int | None = None,
    ) -> None:
        """Applies one gradient row per key by the table's rule; missing rows are created first if admitted.

        A table with a limit evicts rows afterwards, unless the caller gives a ``tick`` and sees to it.

        Args:
            keys: distinct int64 keys. A repeated key is updated once per appearance.
            gradients: float32 [n, num_weights] (``dim``, without the two counters of Ctr accessors).
            shows, clicks: float32 [n]; ``None`` is 1 and 0.
            slots: uint32 [n], the feature slot that an accessor's row remembers; ``None`` keeps it.
            tick: number of the change, larger than those before; ``None`` counts on. The caller must call
                :meth:`victims` and :meth:`erase` then.

        Raises:
            ConfigError: an array has the wrong shape or dtype; nothing was applied.
        """
        keys = _check_keys("push", keys)
        gradients = self._check("gradients", gradients, (len(keys), self.layout.num_weights), np.float32)
        shows = None if shows is None else self._check("shows", shows, (len(keys),), np.float32)
        clicks = None if clicks is None else self._check("clicks", clicks, (len(keys),), np.float32)
        slots = None if slots is None else self._check("slots", slots, (len(keys),), np.uint32)
        self._begin_change(len(keys), tick)
        self._push(keys, gradients, shows, clicks, slots)
        # After the change: its new rows may have filled the memory of a sub-shard whose rows may lie on disk.
        self._memory.cool()
        # A server gives a tick and calls victims(), because the eviction needs a journal record first.
        if tick is None:
            self.evict()

    def add(self, keys: Int64s, deltas: Float32s, *, tick: int | None = None) -> None:
        """Adds one row of deltas [n, num_weights] per key to the weights (geo); state and statistics stay.

        ``tick`` as in :meth:`push`.
        """
        keys = _check_keys("add", keys)
        deltas = self._check("deltas", deltas, (len(keys), self.layout.num_weights), np.float32)
        self._begin_change(len(keys), tick)
        self._add(keys, deltas)
        self._memory.cool()
        if tick is None:
            self.evict()

    def contains(self, keys: Int64s) -> npt.NDArray[np.bool_]:
        """Returns for each key whether it has a row (ids that wait for admission have none)."""
        return self._contains(_check_keys("contains", keys))

    def _begin_change(self, num_rows: int, tick: int | None) -> None:
        """Makes room for ``num_rows`` more rows and numbers the change; with a tick the index was checked before."""
        (self._memory.make_room if tick is not None else self.make_room)(num_rows)
        self._memory.tick = self._memory.tick + 1 if tick is None else tick

    # -- life of rows --------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int) -> None:
        """Sees to it that ``num_rows`` new rows have space on the disk, for a table with ``rows="disk"``.

        Raises:
            PSError: the disk is full, or the index its part of ``memory_bytes``; the table is as before.
        """
        self._memory.check_index(num_rows)
        self._memory.make_room(num_rows)

    def victims(self) -> Int64s:
        """Returns the keys that a table above its limit must lose, in no particular order; mostly none.

        They depend on the keys and on when each was pushed, and on nothing else.
        """
        keys: Int64s = self._memory.victims()
        return keys

    def erase(self, keys: Int64s) -> int:
        """Deletes the rows of ``keys``; returns how many there were."""
        erased = self._erase(_check_keys("erase", keys))
        self._tell_deleted(keys)
        return erased

    def _tell_deleted(self, keys: Int64s) -> None:
        self.chain.note_deleted(keys)
        if self.on_delete is not None and len(keys):
            self.on_delete(keys)

    def evict(self) -> Int64s:
        """Brings a table that is above its limit below it; returns the keys that were deleted."""
        keys = self.victims()
        if len(keys):
            self.erase(keys)
        return keys

    def shrink(self, threshold: float | None = None, max_unseen_days: float | None = None) -> int:
        """Returns how many rows were deleted: those below ``threshold``, and those unseen too long.

        With an accessor shows and clicks first decay by ``show_click_decay_rate``, the threshold is on the score
        (default ``delete_threshold``) and the days default to ``delete_after_unseen_days``. Without one the
        threshold is on the number of pushes (it saturates at 32767). Training may continue.

        Raises:
            ConfigError: a table without an accessor was given no criterion.
        """
        accessor = self.config.accessor
        if accessor is None and threshold is None and max_unseen_days is None:
            raise ConfigError(
                f"shrink of table {self.config.name!r}: no threshold and no max_unseen_days, but the "
                "table has no accessor to take them from. Give one of the two."
            )
        if accessor is not None:
            threshold = accessor.delete_threshold if threshold is None else threshold
            max_unseen_days = accessor.delete_after_unseen_days if max_unseen_days is None else max_unseen_days
        least = -np.inf if threshold is None else float(threshold)
        days = np.inf if max_unseen_days is None else float(max_unseen_days)
        decay = 1.0 if accessor is None else accessor.show_click_decay_rate
        return len(self._shrink(least, days, decay))

    def _shrink(self, least: float, days: float, decay: float) -> Int64s:
        keys = np.concatenate([self._shrink_window(w, least, days, decay) for w in self.plan_windows()])
        self._tell_deleted(keys)
        return keys

    def advance_day(self) -> None:
        """Adds one to the unseen days of every row (a save of mode 3 does); those unseen for ``ttl_days`` go."""
        self._memory.day += 1
        bounds = self.config.bounds
        if bounds is not None and bounds.ttl_days is not None:
            self._shrink(-np.inf, float(bounds.ttl_days) - 1, 1.0)

    def clear(self) -> None:
        """Removes every row."""
        # Listing the keys walks over the whole table, so it is done only for a sink or a save chain.
        if self.on_delete is not None or self.chain.saves:
            self._tell_deleted(self.keys())
        self._clear()

    def close(self) -> None:
        """Releases the memory; no thread may be using the table, and every later call raises PSError."""
        self._memory.close()
        self._memory = _Closed(self.config.name)

    def load_kernels(self) -> None:
        """Loads the kernels of every call now; the table is empty.

        A server does so before it answers. Without a free file descriptor no kernel could be loaded later, and a
        journaled change could not be applied.
        """
        with naming_the_cause():
            self._memory.load_kernels()

    # -- walks ---------------------------------------------------------------------------------------------------

    def plan_windows(self, rows_per_window: int = ROWS_PER_WINDOW) -> list[Window]:
        """Returns windows that together hold every key exactly once, also while rows come and go."""
        windows = []
        for s, entries in enumerate(self._memory.entries):
            parts = max(1, -(-entries // rows_per_window))
            edges = [_PLACES * i // parts for i in range(parts + 1)]
            windows += [(s, a, b) for a, b in zip(edges, edges[1:], strict=False)]
        return windows

    def copy_window(self, window: Window, stamp: Callable[[], int] | None = None) -> RowBlock:
        """Returns a consistent copy of a window's rows; with ``stamp``, no push inside the gate overlaps it."""
        if stamp is None:
            return self._copy_window(window)
        # Pushes hold the shared side of the gate, so the stamp belongs to exactly these rows.
        with self.gate.exclusive():
            block = self._copy_window(window)
            block.stamp = stamp()
        return block

    def blocks(
        self, rows_per_window: int = ROWS_PER_WINDOW, stamp: Callable[[], int] | None = None
    ) -> Iterator[RowBlock]:
        """Yields every row once, in blocks that are each consistent; training may continue."""
        for window in self.plan_windows(rows_per_window):
            block = self.copy_window(window, stamp)
            if len(block):
                yield block

    def keys(self) -> Int64s:
        """Returns the keys that have a row, in no particular order."""
        found = [block.keys[block.admitted] for block in self.blocks()]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def reserve(self, num_rows: int) -> None:
        """Makes room for ``num_rows`` more rows, so that loading them in the order of a save stays fast."""
        self._reserve(num_rows)

    def insert(self, block: RowBlock, *, evict: bool = True) -> None:
        """Inserts rows as they are, replacing those of the same keys (loading).

        A table with a limit evicts rows afterwards, if ``evict`` is True. Rows without ranks count as pushed before all
        others of the table, in the order of their unseen days.
        """
        shape = (len(block), self.layout.row_floats)
        if block.values.shape != shape:
            raise ConfigError(
                f"insert into table {self.config.name!r}: rows are {block.values.shape}; the table takes {shape}."
            )
        (self.make_room if evict else self._memory.make_room)(len(block))
        self._insert(block)
        self._memory.cool()
        if evict:
            self.evict()

    def settle(self, keys: Int64s, delta_scores: Float32s) -> None:
        """Subtracts saved delta scores from the rows that still exist (save modes 1 and 2)."""
        if self.layout.has_statistics:
            self._settle(np.ascontiguousarray(keys), np.ascontiguousarray(delta_scores, np.float32))

    # -- kernels -------------------------------------------------------------------------------------------------
    # What follows calls the kernels and checks nothing; the tests replace it by the same in plain numpy.

    def _scratch(self, keys: Int64s) -> npt.NDArray[np.int64]:
        return np.empty(self._finding.scratch_words(len(keys)), np.int64)

    def _pull(self, keys: Int64s, out: Float32s, drawn: bool) -> None:
        scratch = self._scratch(keys)
        arguments = (address_of(keys), len(keys), address_of(out), int(drawn), address_of(scratch))
        self._requests.pull(self._memory.address, *arguments)

    def _push(
        self,
        keys: Int64s,
        gradients: Float32s,
        shows: Float32s | None,
        clicks: Float32s | None,
        slots: npt.NDArray[np.uint32] | None,
    ) -> None:
        scratch = self._scratch(keys)
        counts = map(address_of, (shows, clicks, slots))
        arguments = (
            address_of(keys),
            len(keys),
            address_of(gradients),
            *counts,
            self._memory.tick,
            address_of(scratch),
        )
        if self._requests.push(self._memory.address, *arguments):
            self._memory.raise_full()

    def _add(self, keys: Int64s, deltas: Float32s) -> None:
        scratch = self._scratch(keys)
        arguments = (address_of(keys), len(keys), address_of(deltas), self._memory.tick, address_of(scratch))
        if self._requests.add(self._memory.address, *arguments):
            self._memory.raise_full()

    def _contains(self, keys: Int64s) -> npt.NDArray[np.bool_]:
        found = np.empty(len(keys), np.bool_)
        scratch = self._scratch(keys)
        self._requests.contains(
            self._memory.address, address_of(keys), len(keys), address_of(found), address_of(scratch)
        )
        return found

    def _copy_window(self, window: Window) -> RowBlock:
        s, first, last = window
        layout = self.layout
        # An estimate from the window's share of the places, with a quarter more for uneven keys. The kernel returns a
        # negative number where the room is too small.
        room = self._memory.entries[s] * (last - first) // _PLACES * 5 // 4 + 64
        while True:
            keys = np.empty(room, np.int64)
            metas = np.empty(room, np.uint64)
            values = np.empty((room, layout.row_floats), np.float32)
            traffic = np.empty(room if layout.has_statistics else 0, _STATISTICS)
            ranks = np.empty(room if layout.has_ranks else 0, np.int64)
            arrays = map(address_of, (keys, metas, values, traffic, ranks))
            n = self._walks.copy_rows(self._memory.address, s, first, last, room, *arrays)
            if n >= 0:
                block = self._block_of(keys[:n], metas[:n], values[:n], traffic[:n])
                block.ranks = ranks[:n] if layout.has_ranks else None
                return block
            room *= 2

    def _block_of(
        self, keys: Int64s, metas: npt.NDArray[np.uint64], values: Float32s, traffic: npt.NDArray[np.void]
    ) -> RowBlock:
        # A meta word: 32 bits of slot (or the pending mark and a count), 16 of the day, 15 of the count, 1 for embedx.
        low = (metas & np.uint64(0xFFFFFFFF)).astype(np.int64)
        admitted = low & PENDING == 0
        seen = (metas >> np.uint64(32)).astype(np.int64) & 0xFFFF
        counts = np.where(admitted, (metas >> np.uint64(48)).astype(np.int64) & MAX_ROW_COUNT, low & PENDING_COUNT)
        kept = None
        if self.layout.has_statistics:
            kept = Statistics(*(traffic[name].copy() for name in ("show", "click", "delta", "slot")))
        # Days are stored modulo 2^16, and so is their difference.
        unseen_days = (self._memory.day - seen) & 0xFFFF
        return RowBlock(keys, unseen_days, counts, admitted, (metas >> np.uint64(63)).astype(np.bool_), values, kept)

    def _insert(self, block: RowBlock) -> None:
        layout = self.layout
        seen = ((self._memory.day - block.unseen_days) & 0xFFFF).astype(np.uint64) << np.uint64(32)
        counts = np.minimum(block.counts, MAX_ROW_COUNT).astype(np.uint64) << np.uint64(48)
        embedx = block.has_embedx.astype(np.uint64) << np.uint64(63)
        pending = np.uint64(PENDING) | block.counts.astype(np.uint64)
        metas = np.where(block.admitted, counts | embedx, pending) | seen
        traffic = np.zeros(len(block) if layout.has_statistics else 0, _STATISTICS)
        if block.statistics is not None and layout.has_statistics:
            kept = block.statistics
            traffic["show"] = kept.shows
            traffic["click"] = kept.clicks
            traffic["delta"] = kept.delta_scores
            traffic["slot"] = kept.slots
        keys = np.ascontiguousarray(block.keys, np.int64)
        values = np.ascontiguousarray(block.values, np.float32)
        ranks = block.ranks
        # Saves of a table without a limit hold no ranks.
        if ranks is None and layout.has_ranks:
            bounds = self.config.bounds
            is_counted = bounds is not None and bounds.evict == "lfu"
            ranks = loaded_ranks(block.unseen_days, block.counts, counted=is_counted)
        if ranks is not None:
            ranks = np.ascontiguousarray(ranks, np.int64)
        arrays = (keys, metas, values, traffic, ranks, self._scratch(keys))
        if self._walks.insert_rows(self._memory.address, len(block), *map(address_of, arrays)):
            self._memory.raise_full()

    def _shrink_window(self, window: Window, least: float, max_unseen_days: float, decay: float) -> Int64s:
        """Decays the window's statistics, deletes rows below ``least`` or unseen too long, returns their keys."""
        criteria = (float(least), float(max_unseen_days), float(decay))
        while True:
            # Other threads may add entries before the kernel runs; then the next round has more room.
            keys = np.empty(self._memory.entries[window[0]] + 64, np.int64)
            n = self._walks.shrink_rows(self._memory.address, *window, *criteria, len(keys), address_of(keys))
            if n >= 0:
                # A copy, so that the large array can be freed.
                return keys[:n].copy()

    def _erase(self, keys: Int64s) -> int:
        scratch = self._scratch(keys)
        return int(self._walks.erase_keys(self._memory.address, address_of(keys), len(keys), address_of(scratch)))

    def _settle(self, keys: Int64s, deltas: Float32s) -> None:
        scratch = self._scratch(keys)
        self._walks.settle_rows(
            self._memory.address, address_of(keys), len(keys), address_of(deltas), address_of(scratch)
        )

    def _reserve(self, num_rows: int) -> None:
        sub_shards = len(self._memory.entries)
        if self._walks.reserve_table(self._memory.address, -(-num_rows // sub_shards)):
            self._memory.raise_full()

    def _clear(self) -> None:
        self._walks.clear_table(self._memory.address)

    def cool(self) -> None:
        """Moves the longest unused rows to the disk where the memory of a table with ``rows="disk"`` is nearly full."""
        self._memory.cool()

    def raise_full(self) -> NoReturn:
        """Raises PSError: a kernel got no memory from the system."""
        self._memory.raise_full()
        raise AssertionError("raise_full() raises")

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Where the kernels find the table, until it is closed."""
        return int(self._memory.address)

    @property
    def is_on_disk(self) -> bool:
        """Whether rows may lie on disk."""
        return self.config.bounds is not None and self.config.bounds.rows == "disk"

    @property
    def layout(self) -> RowLayout:
        """Where weights and state are in a row."""
        layout: RowLayout = self._memory.layout
        return layout

    @property
    def num_rows(self) -> int:
        """How many keys have a row."""
        return int(self._memory.num_rows)

    @property
    def pull_counts(self) -> tuple[int, int]:
        """How many ids pulls have asked for so far, repeated ones included, and how many of them had a row."""
        asked, had = self._memory.pull_counts
        return asked, had

    @property
    def memory_bytes(self) -> int:
        """Bytes held for rows and index."""
        return int(self._memory.memory_bytes)

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk for rows that are not in memory."""
        return int(self._memory.disk_bytes)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next push (0 for a rule without one); assign to change it."""
        return self.config.rule.get("learning_rate") if self._learning_rate is None else self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not 0.0 <= value <= FLOAT32_MAX:
            raise ConfigError(
                f"table {self.config.name!r}: learning_rate is {value!r}; it must be finite in float32 and not "
                "negative."
            )
        self._memory.set_learning_rate(float(value))
        self._learning_rate = float(value)

    def _check(self, what: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
        if array.dtype != dtype or array.shape != shape:
            raise ConfigError(
                f"table {self.config.name!r}: {what} are {array.dtype} {array.shape}; they take "
                f"{np.dtype(dtype)} {shape}."
            )
        return np.ascontiguousarray(array)


class _Closed:
    """Stands in the place of a closed table's memory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "close":
            return lambda: None
        raise PSError(f"table {self._name!r} is closed; it takes no further calls.")


def _check_keys(what: str, keys: Int64s) -> Int64s:
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ConfigError(f"{what}: keys are {keys.dtype} {keys.shape}; they take int64 of one dimension.")
    return np.ascontiguousarray(keys)
