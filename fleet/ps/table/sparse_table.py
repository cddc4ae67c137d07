"""SparseTable: id to row for ids without bound; rows are created when they are first needed.

Safe for any number of threads: a table is 64 sub-shards with a lock each, and the kernels run without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigError, PSError
from fleet.ps.table.gate import Gate
from fleet.ps.table.kernels.numba_cache import naming_the_cause
from fleet.ps.table.layout import Float32s, Int64s, RowLayout, SparseTableConfig
from fleet.ps.table.rows import RowBlock, Window

if TYPE_CHECKING:
    from fleet.ps.table.kernel_store import KernelStore

ROWS_PER_WINDOW = 8192


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
        >>> weights = table.pull(keys)                            # creates the rows
        >>> table.push(keys, np.ones((2, 8), np.float32))         # one gradient row per distinct key
        >>> table.num_rows
        2
    """

    def __init__(self, config: SparseTableConfig, folder: Path | None = None) -> None:
        self.config = config
        self.gate = Gate()
        with naming_the_cause():
            from fleet.ps.table.kernel_store import KernelStore

            self._store = KernelStore(config, folder)
        self._learning_rate: float | None = None
        self.on_delete: Callable[[Int64s], None] | None = None  # called with keys whose rows are deleted

    # -- requests ------------------------------------------------------------------------------------------------

    def pull(self, keys: Int64s, out: Float32s | None = None, *, create: bool = True) -> Float32s:
        """Returns the rows of ``keys`` as float32 [n, dim], written to ``out`` where given.

        A missing row is created from the initializer if ``create`` is True, the table creates on pull, and the
        entry policy admits the id; otherwise it reads as zeros. Repeated keys are allowed.

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
        self._store.pull(keys, out, create)
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
        (self._store.make_room if tick is not None else self.make_room)(len(keys))
        self._store.tick = self._store.tick + 1 if tick is None else tick
        self._store.push(keys, gradients, shows, clicks, slots)
        self._store.cool()
        if tick is None:
            self.evict()

    def add(self, keys: Int64s, deltas: Float32s, *, tick: int | None = None) -> None:
        """Adds one row of deltas [n, num_weights] per key to the weights (geo); state and statistics stay.

        ``tick`` as in :meth:`push`.
        """
        keys = _check_keys("add", keys)
        deltas = self._check("deltas", deltas, (len(keys), self.layout.num_weights), np.float32)
        (self._store.make_room if tick is not None else self.make_room)(len(keys))
        self._store.tick = self._store.tick + 1 if tick is None else tick
        self._store.add(keys, deltas)
        self._store.cool()
        if tick is None:
            self.evict()

    def contains(self, keys: Int64s) -> npt.NDArray[np.bool_]:
        """Returns for each key whether it has a row (ids that wait for admission have none)."""
        return self._store.contains(_check_keys("contains", keys))

    # -- life of rows --------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int) -> None:
        """Sees to it that ``num_rows`` new rows have space on the disk, for a table with ``rows="disk"``.

        Raises:
            PSError: the disk is full, or the index its part of ``memory_bytes``; the table is as before.
        """
        self._store.check_index(num_rows)
        self._store.make_room(num_rows)

    def victims(self) -> Int64s:
        """Returns the keys that a table above its limit must lose, in no particular order; mostly none.

        They depend on the keys and on when each was pushed, and on nothing else.
        """
        return self._store.victims()

    def erase(self, keys: Int64s) -> int:
        """Deletes the rows of ``keys``; returns how many there were."""
        erased = self._store.erase(_check_keys("erase", keys))
        if self.on_delete is not None:
            self.on_delete(keys)
        return erased

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
        threshold is on the number of pushes (it saturates at 32767). Training may continue meanwhile.

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
        keys = np.concatenate([self._store.shrink_window(w, least, days, decay) for w in self.plan_windows()])
        if self.on_delete is not None and len(keys):
            self.on_delete(keys)
        return keys

    def advance_day(self) -> None:
        """Adds one to the unseen days of every row (a save of mode 3 does); those unseen for ``ttl_days`` go."""
        self._store.day += 1
        bounds = self.config.bounds
        if bounds is not None and bounds.ttl_days is not None:
            self._shrink(-np.inf, float(bounds.ttl_days) - 1, 1.0)

    def clear(self) -> None:
        """Removes every row."""
        if self.on_delete is not None:
            self.on_delete(self.keys())
        self._store.clear()

    def close(self) -> None:
        """Releases the memory; no thread may be using the table, and every later call raises PSError."""
        self._store.close()
        self._store = cast("KernelStore", _Closed(self.config.name))

    def load_kernels(self) -> None:
        """Loads the kernels of every call now; the table is empty.

        A server does so before it answers. Without a free file descriptor no kernel could be loaded later, and a
        journaled change could not be applied.
        """
        with naming_the_cause():
            self._store.load_kernels()

    # -- walks ---------------------------------------------------------------------------------------------------

    def plan_windows(self, rows_per_window: int = ROWS_PER_WINDOW) -> list[Window]:
        """Returns windows that together hold every key exactly once, also while rows come and go."""
        return self._store.plan_windows(rows_per_window)

    def copy_window(self, window: Window, stamp: Callable[[], int] | None = None) -> RowBlock:
        """Returns a consistent copy of a window's rows; with ``stamp``, no push inside the gate overlaps it."""
        if stamp is None:
            return self._store.copy_window(window)
        with self.gate.exclusive():
            block = self._store.copy_window(window)
            block.stamp = stamp()
        return block

    def blocks(
        self, rows_per_window: int = ROWS_PER_WINDOW, stamp: Callable[[], int] | None = None
    ) -> Iterator[RowBlock]:
        """Yields every row once, in blocks that are each consistent; training may continue meanwhile."""
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
        self._store.reserve(num_rows)

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
        (self.make_room if evict else self._store.make_room)(len(block))
        self._store.insert(block)
        self._store.cool()
        if evict:
            self.evict()

    def settle(self, keys: Int64s, delta_scores: Float32s) -> None:
        """Subtracts saved delta scores from the rows that still exist (save modes 1 and 2)."""
        self._store.settle(keys, delta_scores)

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> RowLayout:
        """Where weights and state are in a row."""
        return self._store.layout

    @property
    def num_rows(self) -> int:
        """How many keys have a row."""
        return self._store.num_rows

    @property
    def pull_counts(self) -> tuple[int, int]:
        """How many ids pulls have asked for so far, repeated ones included, and how many of them had a row."""
        return self._store.pull_counts

    @property
    def memory_bytes(self) -> int:
        """Bytes held for rows and index."""
        return self._store.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk for rows that are not in memory."""
        return self._store.disk_bytes

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next push (0 for a rule without one); assign to change it."""
        return self.config.rule.get("learning_rate") if self._learning_rate is None else self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not 0.0 <= value < float("inf"):
            raise ConfigError(
                f"table {self.config.name!r}: learning_rate is {value!r}; it must be finite and not negative."
            )
        self._store.set_learning_rate(float(value))
        self._learning_rate = float(value)

    def _check(self, what: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
        if array.dtype != dtype or array.shape != shape:
            raise ConfigError(
                f"table {self.config.name!r}: {what} are {array.dtype} {array.shape}; they take "
                f"{np.dtype(dtype)} {shape}."
            )
        return np.ascontiguousarray(array)


class _Closed:
    """Stands where the store of a closed table was."""

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
