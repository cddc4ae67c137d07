"""ReferenceStore: the rows of one sparse table in a dictionary and numpy arrays.

The oracle of the kernels behind :class:`fleet.ps.table.sparse_table.SparseTable`: the same results, slowly. One lock,
everything in plain sight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.ps.table.accessor import Accessor, accessor_score
from fleet.ps.table.eviction import FIRST_TICK, limit_of, loaded_ranks, plan_shares
from fleet.ps.table.gate import Gate
from fleet.ps.table.hash import NUM_SUB_SHARDS, mix, mix_int
from fleet.ps.table.layout import ColumnBlock, Float32s, Int64s, SparseTableConfig, admission_of, plan_layout
from fleet.ps.table.rows import MAX_ROW_COUNT, MAX_UNSEEN_DAYS, RowBlock, Statistics, Window
from fleet.ps.table.rules import LEARNING_RATE
from fleet.ps.table.save_chain import SaveChain
from fleet.ps.table.sparse_table import ROWS_PER_WINDOW, SparseTable
from tests.fleet.ps.reference_ids import initial_values, place_of, sub_shard_of, uniform_bits
from tests.fleet.ps.reference_rules import update_rows

_NEVER_SCORED = Accessor()


class ReferenceStore:
    """Rows in ``self._places`` (key to line of the arrays); ids not admitted yet in ``self._pending``."""

    def __init__(self, config: SparseTableConfig) -> None:
        self.config, self.layout = config, plan_layout(config)
        self.day = 0
        self._blocks = list(self.layout.blocks)
        self._accessor = config.accessor or _NEVER_SCORED
        self._admission, self._admission_argument = admission_of(config.entry)
        self._lock = threading.RLock()
        self._counted = config.bounds is not None and config.bounds.evict == "lfu"
        self._limit = limit_of(config)
        self.tick = 0
        self.pull_counts = 0, 0
        self.clear()

    def load_kernels(self) -> None:
        """Has none."""

    def make_room(self, num_rows: int) -> None:
        """Has no disk."""

    def check_index(self, num_rows: int) -> None:
        """Has no limit in bytes."""

    def cool(self) -> None:
        """Has no disk."""

    def clear(self) -> None:
        """Forgets every row."""
        with self._lock:
            self._places: dict[int, int] = {}
            self._pending: dict[int, list[int]] = {}
            self._ranks: dict[int, int] = {}
            self._free: list[int] = []
            self._used = 0
            self._allocate(64)

    def close(self) -> None:
        """Releases the memory; the store cannot be used afterwards."""
        self.clear()

    def _allocate(self, capacity: int) -> None:
        def grown(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            fresh: npt.NDArray[Any] = np.zeros(shape, dtype)
            if self._used:
                fresh[: self._used] = getattr(self, name)[: self._used]
            return fresh

        self._values = grown("_values", (capacity, self.layout.row_floats), np.float32)
        self._traffic = grown("_traffic", (capacity, 2), np.float64)
        self._delta_scores = grown("_delta_scores", (capacity,), np.float32)
        self._slots = grown("_slots", (capacity,), np.uint32)
        self._last_seen = grown("_last_seen", (capacity,), np.int64)
        self._counts = grown("_counts", (capacity,), np.int64)
        self._has_embedx = grown("_has_embedx", (capacity,), np.bool_)

    # -- requests ------------------------------------------------------------------------------------------------

    def pull(self, keys: Int64s, out: Float32s, drawn: bool) -> None:
        """Writes the pulled columns of each key; with ``drawn``, of a missing row those that it will begin with."""
        draws = drawn and self.config.create_on == "pull" and self._admission != 1
        with self._lock:
            missing = [key for key in keys.tolist() if key not in self._places]
            self.pull_counts = self.pull_counts[0] + len(keys), self.pull_counts[1] + len(keys) - len(missing)
            made = {key for key in missing if draws and self._is_admitted(key)}
            for key in made:
                self._new_row(key)
            lines, found = self._lines(keys)
            counters = self.layout.num_counters
            out[:] = 0
            out[found, counters:] = self._values[lines, : self.layout.num_weights]
            if counters:
                out[found, :counters] = self._traffic[lines]
            for key in made:  # as if the pull had not been
                self._erase(key)

    def push(
        self,
        keys: Int64s,
        gradients: Float32s,
        shows: Float32s | None,
        clicks: Float32s | None,
        slots: npt.NDArray[np.uint32] | None,
    ) -> None:
        """Applies one gradient row per key."""
        with self._lock:
            for i, key in enumerate(keys.tolist()):
                score = accessor_score(
                    self._accessor,
                    1.0 if shows is None else float(shows[i]),
                    0.0 if clicks is None else float(clicks[i]),
                )
                self._count(key, score)
            for places in _rounds(keys):
                self._push_distinct(
                    keys[places],
                    gradients[places],
                    None if shows is None else shows[places],
                    None if clicks is None else clicks[places],
                    None if slots is None else slots[places],
                )

    def _push_distinct(
        self,
        keys: Int64s,
        gradients: Float32s,
        shows: Float32s | None,
        clicks: Float32s | None,
        slots: npt.NDArray[np.uint32] | None,
    ) -> None:
        lines, found = self._lines(keys)
        shows = np.ones(len(keys), np.float32) if shows is None else shows
        clicks = np.zeros(len(keys), np.float32) if clicks is None else clicks
        if self.layout.has_statistics:
            self._traffic[lines, 0] += shows[found]
            self._traffic[lines, 1] += clicks[found]
            self._delta_scores[lines] += accessor_score(
                self._accessor, shows[found].astype(np.float64), clicks[found].astype(np.float64)
            ).astype(np.float32)
            if slots is not None:
                self._slots[lines] = slots[found]
        scales = self.config.accessor is None or self._accessor.scales_by_show
        for number, block in enumerate(self._blocks):
            kept = np.ones(len(lines), bool) if number == 0 else self._has_embedx[lines]
            rows = self._values[lines[kept]]
            state = np.ascontiguousarray(rows[:, block.state : block.state + block.state_width])
            weights = np.ascontiguousarray(rows[:, block.column : block.column + block.width])
            gradient = gradients[found][kept, block.column : block.column + block.width]
            update_rows(block.rule, weights, state, gradient, shows[found][kept] if scales else None)
            rows[:, block.column : block.column + block.width] = weights
            rows[:, block.state : block.state + block.state_width] = state
            self._values[lines[kept]] = rows
        if len(self._blocks) > 1:
            score = accessor_score(self._accessor, self._traffic[lines, 0], self._traffic[lines, 1])
            self._extend(keys[found], lines, score >= self._accessor.embedx_threshold)

    def add(self, keys: Int64s, deltas: Float32s) -> None:
        """Adds one row of deltas per key to the weights; state and statistics stay."""
        with self._lock:
            for key in keys.tolist():
                self._count(key, 1.0)
            lines, found = self._lines(keys)
            for block in self._blocks[1:]:
                fresh = lines[~self._has_embedx[lines]]
                self._values[fresh, block.state : block.state + block.state_width] = block.rule.initial_state
            np.add.at(self._values, (lines[:, None], np.arange(self.layout.num_weights)), deltas[found])
            self._has_embedx[lines] = True

    def contains(self, keys: Int64s) -> npt.NDArray[np.bool_]:
        """Returns which keys have a row."""
        with self._lock:
            return np.fromiter((key in self._places for key in keys.tolist()), bool, len(keys))

    # -- rows ----------------------------------------------------------------------------------------------------

    def _lines(self, keys: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        lines = np.fromiter((self._places.get(key, -1) for key in keys.tolist()), np.int64, len(keys))
        return lines[lines >= 0], lines >= 0

    def _is_admitted(self, key: int) -> bool:
        if self._admission != 2:
            return True
        bits = uniform_bits(self.config.seed, np.array([key], np.int64), -2)[0]
        return bool(bits * 2**32 < self._admission_argument)

    def _count(self, key: int, score: float) -> None:
        self._count_push(key, score)
        if self.layout.has_ranks and key in self._places:
            count = min((self._ranks.get(key, 0) >> 48) + 1, MAX_ROW_COUNT) if self._counted else 0
            self._ranks[key] = (count << 48) + FIRST_TICK + self.tick

    def _count_push(self, key: int, score: float) -> None:
        line = self._places.get(key)
        if line is not None:
            self._counts[line] = min(self._counts[line] + 1, MAX_ROW_COUNT)
            self._last_seen[line] = self.day
            return
        if key not in self._pending and not self._may_start(key, score):
            return
        pending = self._pending.pop(key, [0, 0])
        pending[0] += 1
        if self._admission == 1 and pending[0] < self._admission_argument:
            self._pending[key] = [pending[0], self.day]
            return
        line = self._new_row(key)
        self._counts[line] = min(pending[0], MAX_ROW_COUNT)

    def _may_start(self, key: int, score: float) -> bool:
        if not self._is_admitted(key):
            return False
        if not self._accessor.create_by_score or score >= 1.0:
            return True
        return bool(score > uniform_bits(self.config.seed, np.array([key], np.int64), -3, self.tick)[0])

    def _new_row(self, key: int) -> int:
        if not self._free and self._used == len(self._values):
            self._allocate(2 * self._used)
        line = self._free.pop() if self._free else self._used
        self._used = max(self._used, line + 1)
        self._places[key] = line
        self._values[line], self._traffic[line] = 0, 0
        self._delta_scores[line], self._slots[line], self._counts[line] = 0, 0, 0
        self._last_seen[line] = self.day
        whole = len(self._blocks) == 1 or self.config.create_on == "pull" and self._accessor.embedx_threshold <= 0
        for block in self._blocks[: None if whole else 1]:
            self._initialise(np.array([key], np.int64), np.array([line]), block)
        self._has_embedx[line] = whole
        return line

    def _initialise(self, keys: Int64s, lines: Int64s, block: ColumnBlock) -> None:
        drawn = self.config.initializer
        stop = block.column + block.width
        if not (block.column == 0 and self.config.accessor is not None and self._accessor.zero_init):
            self._values[lines, block.column : stop] = initial_values(
                drawn.code, drawn.a, drawn.b, self.config.seed, keys, block.column, stop
            )
        self._values[lines, block.state : block.state + block.state_width] = block.rule.initial_state

    def _extend(self, keys: Int64s, lines: Int64s, reached: npt.NDArray[np.bool_]) -> None:
        grow = reached & ~self._has_embedx[lines]
        self._initialise(keys[grow], lines[grow], self._blocks[1])
        self._has_embedx[lines[grow]] = True

    # -- walks ---------------------------------------------------------------------------------------------------

    def plan_windows(self, rows_per_window: int) -> list[Window]:
        """Returns windows (sub-shard, first place, last place + 1) that together hold every key once."""
        parts = max(1, -(-self.num_entries // (NUM_SUB_SHARDS * rows_per_window)))
        edges = [2**32 * i // parts for i in range(parts + 1)]
        return [(s, a, b) for s in range(NUM_SUB_SHARDS) for a, b in zip(edges, edges[1:], strict=False)]

    def _keys_of(self, window: Window, keys: Sequence[int]) -> Int64s:
        array = np.array(keys, np.int64)
        hashes = mix(array)
        place = place_of(hashes)
        inside = (sub_shard_of(hashes) == window[0]) & (place >= window[1]) & (place < window[2])
        return np.asarray(array[inside], np.int64)

    def copy_window(self, window: Window) -> RowBlock:
        """Returns a copy of the window's rows, ids that wait for admission among them."""
        with self._lock:
            rows, waiting = self._keys_of(window, [*self._places]), self._keys_of(window, [*self._pending])
            lines = self._lines(rows)[0]
            n, m = len(rows), len(waiting)
            pending = np.array([self._pending[key] for key in waiting.tolist()], np.int64).reshape(m, 2)
            last_seen = np.concatenate((self._last_seen[lines], pending[:, 1]))
            block = RowBlock(
                np.concatenate((rows, waiting)),
                np.minimum(self.day - last_seen, MAX_UNSEEN_DAYS),
                np.concatenate((self._counts[lines], pending[:, 0])),
                np.arange(n + m) < n,
                np.concatenate((self._has_embedx[lines], np.zeros(m, bool))),
                np.concatenate((self._values[lines], np.zeros((m, self.layout.row_floats), np.float32))),
            )
            if self.layout.has_ranks:
                block.ranks = np.array([self._ranks.get(key, 0) for key in block.keys.tolist()], np.int64)
            if self.layout.has_statistics:
                block.statistics = Statistics(
                    np.concatenate((self._traffic[lines, 0], np.zeros(m))),
                    np.concatenate((self._traffic[lines, 1], np.zeros(m))),
                    np.concatenate((self._delta_scores[lines], np.zeros(m, np.float32))),
                    np.concatenate((self._slots[lines], np.zeros(m, np.uint32))),
                )
            return block

    def reserve(self, num_rows: int) -> None:
        """Does nothing: the dictionary grows by itself."""

    def insert(self, block: RowBlock) -> None:
        """Puts the rows of ``block`` into the table, over those of the same keys."""
        with self._lock:
            for i, key in enumerate(block.keys.tolist()):
                self._erase(key)
                last_seen = self.day - int(block.unseen_days[i])
                if not block.admitted[i]:
                    self._pending[key] = [int(block.counts[i]), last_seen]
                    continue
                if self.layout.has_ranks:
                    days, counts = block.unseen_days[i : i + 1], block.counts[i : i + 1]
                    ranks = loaded_ranks(days, counts, counted=self._counted)
                    self._ranks[key] = int((ranks if block.ranks is None else block.ranks[i : i + 1])[0])
                line = self._new_row(key)
                self._values[line], self._has_embedx[line] = block.values[i], block.has_embedx[i]
                self._counts[line], self._last_seen[line] = block.counts[i], last_seen
                if block.statistics is not None and self.layout.has_statistics:
                    kept = block.statistics
                    self._traffic[line] = kept.shows[i], kept.clicks[i]
                    self._delta_scores[line], self._slots[line] = kept.delta_scores[i], kept.slots[i]

    def _erase(self, key: int) -> None:
        self._pending.pop(key, None)
        self._ranks.pop(key, None)
        line = self._places.pop(key, None)
        if line is not None:
            self._free.append(line)

    def shrink_window(self, window: Window, least: float, max_unseen_days: float, decay: float) -> Int64s:
        """Decays the window's statistics, deletes rows below ``least`` or unseen too long, returns their keys."""
        with self._lock:
            rows = self._keys_of(window, [*self._places])
            lines = self._lines(rows)[0]
            self._traffic[lines] *= decay
            level = self._counts[lines].astype(np.float64)
            if self.layout.has_statistics:
                level = accessor_score(self._accessor, self._traffic[lines, 0], self._traffic[lines, 1])
            doomed = rows[(level < least) | (self.day - self._last_seen[lines] > max_unseen_days)].tolist()
            doomed += [
                key
                for key in self._keys_of(window, [*self._pending]).tolist()
                if self.day - self._pending[key][1] > max_unseen_days
            ]
            for key in doomed:
                self._erase(key)
            return np.array(doomed, np.int64)

    def victims(self) -> Int64s:
        """Returns the keys that a table above its limit must lose."""
        if self._limit is None:
            return np.empty(0, np.int64)
        shares = plan_shares(self._limit)
        found: list[int] = []
        with self._lock:
            counts = {key: count for key, (count, _) in self._pending.items()}
            for ranks in (self._ranks, counts):
                for group in range(shares.groups):
                    keys = np.array([*ranks], np.int64)
                    mine = keys[sub_shard_of(mix(keys)) * shares.groups // NUM_SUB_SHARDS == group].tolist()
                    if len(mine) > shares.most:
                        mine.sort(key=lambda key: (ranks[key], mix_int(key)))
                        found += mine[: len(mine) - shares.kept]
        return np.array(found, np.int64)

    def erase(self, keys: Int64s) -> int:
        """Deletes the rows of ``keys``; returns how many there were."""
        with self._lock:
            known = [key for key in keys.tolist() if key in self._places or key in self._pending]
            for key in known:
                self._erase(key)
            return len(known)

    def settle(self, keys: Int64s, delta_scores: Float32s) -> None:
        """Takes ``delta_scores`` off the rows that still exist."""
        with self._lock:
            lines, found = self._lines(keys)
            self._delta_scores[lines] -= delta_scores[found]

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """How many keys have a row."""
        return len(self._places)

    @property
    def num_entries(self) -> int:
        """How many keys are known: rows, and ids that wait for admission."""
        return len(self._places) + len(self._pending)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the row arrays plus about 100 per dictionary entry."""
        arrays = (self._values, self._traffic, self._delta_scores, self._slots, self._last_seen, self._counts)
        return sum(a.nbytes for a in arrays) + 100 * self.num_entries

    def set_learning_rate(self, learning_rate: float) -> None:
        """Makes every later push use ``learning_rate`` in each block whose rule has one."""
        with self._lock:
            self._blocks = [
                ColumnBlock(
                    b.rule.with_learning_rate(learning_rate) if LEARNING_RATE in b.rule.hyper else b.rule,
                    b.column,
                    b.width,
                    b.state,
                )
                for b in self._blocks
            ]


class ReferenceTable(SparseTable):
    """A sparse table on a reference store: nothing is compiled."""

    def __init__(self, config: SparseTableConfig) -> None:
        self.config = config
        self.gate = Gate()
        self._memory = ReferenceStore(config)
        self._learning_rate = None
        self.chain = SaveChain()
        self.on_delete = None

    def _pull(self, keys: Int64s, out: Float32s, drawn: bool) -> None:
        self._memory.pull(keys, out, drawn)

    def _push(self, keys: Int64s, *gradients: Any) -> None:
        self._memory.push(keys, *gradients)

    def _add(self, keys: Int64s, deltas: Float32s) -> None:
        self._memory.add(keys, deltas)

    def _contains(self, keys: Int64s) -> npt.NDArray[np.bool_]:
        return self._memory.contains(keys)

    def plan_windows(self, rows_per_window: int = ROWS_PER_WINDOW) -> list[Window]:
        return self._memory.plan_windows(rows_per_window)

    def _copy_window(self, window: Window) -> RowBlock:
        return self._memory.copy_window(window)

    def _insert(self, block: RowBlock) -> None:
        self._memory.insert(block)

    def _shrink_window(self, window: Window, least: float, max_unseen_days: float, decay: float) -> Int64s:
        return self._memory.shrink_window(window, least, max_unseen_days, decay)

    def _erase(self, keys: Int64s) -> int:
        return self._memory.erase(keys)

    def _settle(self, keys: Int64s, deltas: Float32s) -> None:
        self._memory.settle(keys, deltas)

    def _reserve(self, num_rows: int) -> None:
        self._memory.reserve(num_rows)

    def _clear(self) -> None:
        self._memory.clear()


class ReferenceGroup:
    """Several reference tables, one after the other."""

    def __init__(self, tables: Sequence[SparseTable]) -> None:
        self.tables = tables

    def pull(self, keys: Int64s, ends: Int64s, out: Float32s, *, drawn: bool = True) -> Float32s:
        for table, own in self._each(ends):
            table.pull(keys[own], out[own], create=drawn)
        return out

    def push(self, keys: Int64s, ends: Int64s, *arrays: Any, tick: int) -> None:
        for table, own in self._each(ends):
            table.push(keys[own], *(None if array is None else array[own] for array in arrays), tick=tick)

    def _each(self, ends: Int64s) -> Iterator[tuple[SparseTable, slice]]:
        start = 0
        for table, end in zip(self.tables, ends.tolist(), strict=True):
            yield table, slice(start, end)
            start = end


def table_of(config: SparseTableConfig, use_kernels: bool) -> SparseTable:
    """Returns a table of the kernels, or one of the reference store."""
    return SparseTable(config) if use_kernels else ReferenceTable(config)


def _rounds(keys: Int64s) -> list[Int64s]:
    """Places of the keys in rounds without repetition: one round unless the caller repeats a key."""
    if len(np.unique(keys)) == len(keys):
        return [np.arange(len(keys))]
    rounds: list[list[int]] = []
    seen: dict[int, int] = {}
    for place, key in enumerate(keys.tolist()):
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(place)
    return [np.array(places) for places in rounds]
