"""TableMemory: the memory of one sparse table, in which the numba kernels find its rows; and its limits.

The memory is the kernels' own. It is released by :meth:`TableMemory.close`, or with the object.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fleet.errors import ConfigError, PSError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.disk_space import DiskSpace, plan_memory
from fleet.ps.table.eviction import FIRST_TICK, INDEX_BYTES, limit_of, oldest, plan_shares
from fleet.ps.table.hash import GOLDEN, NUM_SUB_SHARDS, mix_int
from fleet.ps.table.kernels import common as k
from fleet.ps.table.kernels import finding, row_kernels, row_requests, rule_kernels, walks
from fleet.ps.table.kernels.numba_cache import address_of
from fleet.ps.table.layout import Int64s, SparseTableConfig, admission_of, part_bytes, plan_layout
from fleet.ps.table.rules import LEARNING_RATE

_AGING_PERIOD = 16384
_ROWS, _WAITING, _HOT = 0, 1, 2  # which ids to list


def _scratch(n: int) -> npt.NDArray[np.int64]:
    return np.empty(finding.scratch_words(n), np.int64)


class TableMemory:
    """Holds the state block of a table (see [Note: State block]), whose address the kernels get with every call.

    Args:
        config: of the table.
        folder: where rows on disk lie; only a table with ``rows="disk"`` uses it.

    Attributes:
        address: of the state block.
    """

    def __init__(self, config: SparseTableConfig, folder: Path | None = None) -> None:
        self.config = config
        self.layout = plan_layout(config)
        self._header = np.zeros(k.HEADER_WORDS + 8, np.int64)
        self._subs = np.zeros(NUM_SUB_SHARDS * k.SUB_WORDS + 8, np.int64)
        self._floats = np.zeros(k.NUM_FLOATS)
        self._params = [rule_kernels.rule_parameters(block.rule) for block in self.layout.blocks]
        limit = limit_of(config)
        self._shares = None if limit is None else plan_shares(limit)
        self._listing = threading.Lock()
        self._listed = np.empty((2, 0), np.int64)
        self.address = self._fill_header()
        self._disk: DiskSpace | None = None
        if config.bounds is not None and config.bounds.rows == "disk":
            self._open_disk(config, folder)
        if walks.open_table(self.address):
            self.raise_full()
        kept = (self._header, self._subs, self._floats, self._params, self._disk)
        self._finalizer = weakref.finalize(self, _release, self.address, kept)
        # At exit other threads may still be at work; the system takes the memory back.
        self._finalizer.atexit = False

    def _fill_header(self) -> int:
        config = self.config
        layout = self.layout
        accessor = self.config.accessor or Accessor()
        # Locks and sub-shards start on cache lines of their own.
        table, subs = (-(-address_of(a) // 64) * 64 for a in (self._header, self._subs))
        h = self._words = np.ndarray(k.HEADER_WORDS, np.int64, self._header, table - address_of(self._header))
        self._shards = np.ndarray((NUM_SUB_SHARDS, k.SUB_WORDS), np.int64, self._subs, subs - address_of(self._subs))
        h[k.NUM_WEIGHTS] = layout.num_weights
        h[k.NUM_COUNTERS] = layout.num_counters
        h[k.ROW_BYTES] = 4 * layout.row_floats
        h[k.HAS_STATISTICS] = layout.has_statistics
        h[k.NUM_BLOCKS] = len(layout.blocks)
        h[k.WHOLE_ROWS] = len(layout.blocks) == 1 or (config.create_on == "pull" and accessor.embedx_threshold <= 0)
        h[k.ADMISSION], h[k.ADMISSION_ARGUMENT] = admission_of(config.entry)
        h[k.DRAWS] = config.create_on == "pull" and h[k.ADMISSION] != 1
        h[k.DRAW] = row_kernels.draw_address(config.initializer.code)
        h[k.GROUP] = finding.group_keys.address
        h[k.FIND] = finding.find_rows.address
        h[k.ADMIT] = row_kernels.admit.address
        h[k.ZERO_INIT] = config.accessor is not None and accessor.zero_init
        h[k.SCALES_BY_SHOW] = config.accessor is None or accessor.scales_by_show
        h[k.CREATE_BY_SCORE] = accessor.create_by_score
        h[k.FLOATS] = address_of(self._floats)
        h[k.SUB_SHARDS] = subs
        self._place_in_chunks()
        h[k.TICK] = FIRST_TICK
        if layout.has_ranks:
            h[k.RANKED] = k.BY_COUNT if config.bounds is not None and config.bounds.evict == "lfu" else k.BY_PUSH
        f = self._floats
        # The seed's 64 bits are stored as they are: a conversion to double would lose the low ones.
        f.view(np.uint64)[k.SEED_BASE] = mix_int(config.seed + GOLDEN)
        f[k.INIT_A] = config.initializer.a
        f[k.INIT_B] = config.initializer.b
        f[k.NONCLK_COEFF] = accessor.nonclk_coeff
        f[k.CLICK_COEFF] = accessor.click_coeff
        f[k.EMBEDX_THRESHOLD] = accessor.embedx_threshold
        self._fill_blocks()
        return table

    def _place_in_chunks(self) -> None:
        """Says where rows, statistics and ranks are in a chunk: one array each, or side by side with rows on disk."""
        h = self._words
        sizes = part_bytes(self.config)
        count, strides = k.CHUNK_ROWS, sizes
        if self.config.bounds is not None and self.config.bounds.rows == "disk":
            count, strides = 1, [sum(sizes)] * 3
        h[k.STATISTICS_AT], h[k.RANKS_AT] = count * sizes[0], count * (sizes[0] + sizes[1])
        h[k.ROW_STRIDE], h[k.STATISTICS_STRIDE], h[k.RANK_STRIDE] = strides
        h[k.CHUNK_BYTES] = k.CHUNK_ROWS * sum(sizes)

    def _fill_blocks(self) -> None:
        for number, block in enumerate(self.layout.blocks):
            self._floats[k.INITIAL_STATE + number] = block.rule.initial_state
            self._words[k.BLOCKS + k.BLOCK_WORDS * number :][:6] = (
                rule_kernels.update_address(block.rule),
                block.column,
                block.width,
                block.state,
                block.state_width,
                address_of(self._params[number]),
            )

    def _open_disk(self, config: SparseTableConfig, folder: Path | None) -> None:
        if folder is None:
            raise ConfigError(
                f'table {config.name!r}: rows="disk" needs a folder on the server to put them in, and this one has '
                "none. Start the servers with FLEET_PS_FOLDER."
            )
        self._memory = plan_memory(config, int(self._words[k.CHUNK_BYTES]))
        self._disk = disk = DiskSpace(folder, config.name)
        self._growing = threading.Lock()
        h = self._words
        h[k.DISK_FROM], h[k.DISK_NEXT], h[k.DISK_TO] = disk.start, disk.start, disk.end
        h[k.DISK_FILE] = disk.descriptor
        h[k.COLD_LIMIT], h[k.MEMORY_CHUNKS] = self._memory.cold_rows, self._memory.hot_chunks

    def make_room(self, num_rows: int) -> None:
        """Sees to it that ``num_rows`` more rows have space on the disk.

        Raises:
            PSError: the disk is full; nothing has changed.
        """
        if self._disk is None:
            return
        h = self._words
        needed = (2 * num_rows // k.CHUNK_ROWS + 3 * NUM_SUB_SHARDS) * int(h[k.CHUNK_BYTES])
        if h[k.DISK_LEFT] < needed:
            with self._growing:
                # Another thread may have grown the file while this one waited.
                if h[k.DISK_LEFT] < needed:
                    walks.add_space(self.address, self._disk.grow(needed - int(h[k.DISK_LEFT])))

    def check_index(self, num_rows: int) -> None:
        """Raises PSError unless the index of a table on disk has room for ``num_rows`` more rows."""
        if self._disk is None or self._shares is not None:
            return
        if INDEX_BYTES * (self.num_entries + num_rows) > self._memory.index_bytes:
            raise PSError(
                f"table {self.config.name!r}: the index of {self.num_entries} ids leaves no room for {num_rows} more "
                f"in its half of memory_bytes, {self._memory.index_bytes} bytes. Raise memory_bytes, set max_rows, or "
                "run the table on more servers."
            )

    def cool(self) -> None:
        """Moves the longest unused rows of sub-shards whose memory is nearly full to the disk."""
        if self._disk is None:
            return
        # Between 15/16 and 4/5 of the room, so that one listing of the ranks makes room for many rows.
        room = self._memory.hot_chunks * k.CHUNK_ROWS
        for s in np.flatnonzero(self._shards[:, k.HOT_ROWS] > room - room // 16).tolist():
            with self._listing:
                keys, ranks = self._list_ranks(range(s, s + 1), _HOT)
                count = len(keys) - (room - room // 5)
                # A copy: the next listing uses the same memory.
                cold = oldest(keys, ranks, count).copy() if count > 0 else keys[:0]
            scratch = _scratch(len(cold))
            walks.cool_keys(self.address, address_of(cold), len(cold), address_of(scratch))

    def raise_full(self) -> NoReturn:
        """Raises PSError: a kernel got no memory from the system."""
        raise PSError(
            f"table {self.config.name!r}: out of memory at {self.num_rows} rows and "
            f"{self.memory_bytes >> 20} MiB. Shrink the table, or run it on more servers."
        )

    def load_kernels(self) -> None:
        """Compiles every kernel that the table may need, or loads it from the disk; the table is empty and stays so."""
        table = self.address
        none = np.empty(1, np.int64)
        scratch = _scratch(0)
        at = address_of(none)
        room = address_of(scratch)
        walks.clear_table(table)
        walks.reserve_table(table, 0)
        row_requests.pull(table, at, 0, at, 0, room)
        row_requests.push(table, at, 0, at, 0, 0, 0, 0, room)
        row_requests.add(table, at, 0, at, 0, room)
        row_requests.contains(table, at, 0, at, room)
        row_requests.pull_each(at, at, 0, at, at, 0, room)
        row_requests.push_each(at, at, 0, at, at, 0, 0, 0, 0, 0, room)
        walks.copy_rows(table, 0, 0, 1, 0, at, at, at, at, at)
        walks.insert_rows(table, 0, at, at, at, at, at, room)
        walks.shrink_rows(table, 0, 0, 1, 0.0, 0.0, 1.0, 0, at)
        walks.list_ranks(table, 0, 0, 0, at, at)
        walks.erase_keys(table, at, 0, room)
        walks.cool_keys(table, at, 0, room)
        walks.add_space(table, 0)
        walks.settle_rows(table, at, 0, at, room)
        walks.age_rows(table, 0)

    def close(self) -> None:
        """Releases the memory; no kernel can be called with it afterwards."""
        self._finalizer()

    # -- limits --------------------------------------------------------------------------------------------------

    def victims(self) -> Int64s:
        """Returns the keys that a table above its limit must lose, see [Note: Eviction]; mostly none."""
        if self._shares is None:
            return np.empty(0, np.int64)
        rows = self._shards[:, k.NUM_ROWS]
        found = self._above(rows, _ROWS)
        if self._words[k.ADMISSION] == 1:
            found += self._above(self._shards[:, k.NUM_ENTRIES] - rows, _WAITING)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _above(self, used: Int64s, which: int) -> list[Int64s]:
        shares = self._shares
        assert shares is not None
        width = NUM_SUB_SHARDS // shares.groups
        found = []
        for group in np.flatnonzero(np.add.reduce(used.reshape(shares.groups, width), axis=1) > shares.most).tolist():
            with self._listing:
                keys, ranks = self._list_ranks(range(group * width, (group + 1) * width), which)
                # The counters were read without the lock, so the list decides.
                if len(keys) > shares.most:
                    found.append(oldest(keys, ranks, len(keys) - shares.kept))
        return found

    def _list_ranks(self, sub_shards: range, which: int) -> tuple[Int64s, Int64s]:
        """Returns keys and ranks in memory that is used again: fresh pages would cost as much as the list."""
        n = 0
        for s in sub_shards:
            while True:
                room = self._listed.shape[1]
                keys = address_of(self._listed) + 8 * n
                added = walks.list_ranks(self.address, s, which, room - n, keys, keys + 8 * room)
                if added >= 0:
                    n += added
                    break
                grown = np.empty((2, 2 * (n + int(self._shards[s, k.NUM_ENTRIES])) + 64), np.int64)
                grown[:, :n] = self._listed[:, :n]
                self._listed = grown
        return self._listed[0, :n], self._listed[1, :n]

    @property
    def tick(self) -> int:
        """The number of the change in progress, which pushes note on rows."""
        return int(self._words[k.TICK]) - FIRST_TICK

    @tick.setter
    def tick(self, value: int) -> None:
        self._words[k.TICK] = FIRST_TICK + value

    # -- facts ---------------------------------------------------------------------------------------------------

    @property
    def day(self) -> int:
        """The day that pushes stamp on rows."""
        return int(self._words[k.DAY])

    @day.setter
    def day(self, value: int) -> None:
        self._words[k.DAY] = value
        # Rows store the day in 16 bits: they are aged before an old day could look like a new one.
        if value % _AGING_PERIOD == 0:
            for s in range(NUM_SUB_SHARDS):
                walks.age_rows(self.address, s)

    @property
    def num_rows(self) -> int:
        """How many keys have a row."""
        return int(self._shards[:, k.NUM_ROWS].sum())

    @property
    def pull_counts(self) -> tuple[int, int]:
        """How many ids pulls have asked for so far, and how many of them had a row."""
        asked, missed = (int(self._shards[:, word].sum()) for word in (k.ASKED, k.MISSED))
        return asked, asked - missed

    @property
    def entries(self) -> list[int]:
        """How many keys each sub-shard knows: rows, and ids that wait for admission."""
        return [int(count) for count in self._shards[:, k.NUM_ENTRIES]]

    @property
    def num_entries(self) -> int:
        """How many keys are known: rows, and ids that wait for admission."""
        return int(self._shards[:, k.NUM_ENTRIES].sum())

    @property
    def memory_bytes(self) -> int:
        """Bytes of indexes and of the chunks that hold rows."""
        lengths = self._shards[:, k.LENGTH]
        chunks = self._shards[:, k.HOT_CHUNKS]
        return int(
            16 * lengths.sum() + chunks.sum() * self._words[k.CHUNK_BYTES] + self._header.nbytes + self._subs.nbytes
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk for cold rows."""
        return 0 if self._disk is None else self._disk.size

    def set_learning_rate(self, learning_rate: float) -> None:
        """Makes every later push use ``learning_rate`` in each block whose rule has one."""
        for block, params in zip(self.layout.blocks, self._params, strict=True):
            if LEARNING_RATE in block.rule.hyper:
                params[rule_kernels.RATE] = learning_rate


def _release(table: int, kept: tuple[Any, ...]) -> None:
    """Releases a table's memory; ``kept`` holds the arrays that the state block consists of until then."""
    walks.close_table(table)
    disk: DiskSpace | None = kept[-1]
    if disk is not None:
        disk.close()
