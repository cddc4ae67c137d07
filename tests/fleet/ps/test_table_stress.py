"""Growth and deletion of the index against a dictionary, and threads against the serial result."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet.ps import Accessor, Initializer, Rule, SparseTable, SparseTableConfig, load_table, save_table
from fleet.ps.files.manifest import blocks_of, read_parts
from fleet.ps.table.kernels.common import CAPACITY, LENGTH, NUM_ENTRIES
from fleet.ps.table.kernels.index_growth import FIRST_CAPACITY
from fleet.ps.table.rows import RowBlock
from tests.fleet.ps._tables import key_with_bits, make_rows, rows_of
from tests.fleet.ps.reference_store import table_of

EXACT = Rule("sgd", {"learning_rate": 1.0})
ZERO = Initializer("constant", 0.0)
# Places of one sub-shard that fall on few homes, at the start, at a window's edge and at the very end of the index.
CROWDED = [
    key_with_bits((5 << 46) | (place << 14))
    for place in (*range(20), *range(2**31 - 12, 2**31 + 12), *range(2**32 - 24, 2**32))
]
KEYS = st.lists(st.one_of(st.sampled_from(CROWDED), st.integers(-3000, 3000)), min_size=1, max_size=60, unique=True)


class TableAgainstDictionary(RuleBasedStateMachine):
    """Any history leaves the table with exactly the rows of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SparseTable(SparseTableConfig("t", 2, EXACT, initializer=ZERO))
        self.model: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    @rule(keys=KEYS)
    def pull(self, keys: list[int]) -> None:
        """Rows have their value; missing ones read as what they begin with, and stay missing."""
        rows = self.table.pull(np.array(keys, np.int64))
        assert rows[:, 1].tolist() == [self.model.get(key, 0.0) for key in keys]

    @rule(keys=KEYS, gradient=st.integers(-3, 3))
    def push(self, keys: list[int], gradient: int) -> None:
        """Rows move by the gradient."""
        self.table.push(np.array(keys, np.int64), np.full((len(keys), 2), gradient, np.float32))
        for key in keys:
            self.model[key] = self.model.get(key, 0.0) - gradient
            self.counts[key] = self.counts.get(key, 0) + 1

    @rule(threshold=st.integers(0, 4))
    def shrink(self, threshold: int) -> None:
        """Rows with few pushes go."""
        doomed = [key for key, count in self.counts.items() if count < threshold]
        assert self.table.shrink(threshold=threshold) == len(doomed)
        for key in doomed:
            del self.model[key], self.counts[key]

    @rule()
    def move(self) -> None:
        """All rows, through blocks, into a new table."""
        fresh = SparseTable(self.table.config)
        for block in self.table.blocks(7):
            fresh.insert(block)
        self.table.close()
        self.table = fresh

    @invariant()
    def same_rows(self) -> None:
        """The walk finds every row once."""
        assert self.table.num_rows == len(self.model)
        found = rows_of(self.table, 50)
        assert {key: row[4][0] for key, row in found.items()} == self.model
        assert {key: row[1] for key, row in found.items()} == self.counts

    def teardown(self) -> None:
        """Frees the memory."""
        self.table.close()


def _examples(count: int) -> settings:
    return settings(max_examples=count, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


class TestTableAgainstDictionary(TableAgainstDictionary.TestCase):
    """A few examples."""

    settings = _examples(12)


@pytest.mark.slow
class TestTableAgainstDictionaryLonger(TableAgainstDictionary.TestCase):
    """More of them."""

    settings = _examples(40)


def test_growth_keeps_the_load() -> None:
    """Study 3: an index grows by half at three quarters, so it is never emptier than half once it has grown."""
    table = SparseTable(SparseTableConfig("t", 1, EXACT, initializer=ZERO))
    keys = np.arange(200_000) * 7919
    for start in range(0, len(keys), 10_000):
        make_rows(table, keys[start : start + 10_000])
    shards = table._memory._shards  # type: ignore[union-attr]
    load = shards[:, NUM_ENTRIES] / shards[:, CAPACITY]
    assert (load <= 0.75).all()
    assert (load > 0.45).all()
    assert (shards[:, CAPACITY] > FIRST_CAPACITY).all()
    assert (shards[:, LENGTH] - shards[:, CAPACITY] <= 512).all()
    assert table.contains(keys).all()
    assert not table.contains(keys + 1).any()


def test_deleted_rows_are_used_again() -> None:
    """Memory does not grow when as many rows come as go."""
    table = SparseTable(SparseTableConfig("t", 8, EXACT, initializer=ZERO))
    make_rows(table, range(50_000))
    before = table.memory_bytes
    for round_ in range(1, 6):
        assert table.shrink(threshold=2) == 50_000
        make_rows(table, np.arange(50_000) + 50_000 * round_)
        assert (table.pull(np.arange(50_000) + 50_000 * round_) == 0).all()
    assert table.memory_bytes < 1.2 * before


def test_four_threads_give_the_serial_result() -> None:
    """Study 2c: concurrent pushes to shared rows while the table grows lose nothing (integers add exactly)."""
    config = SparseTableConfig("t", 4, EXACT, initializer=ZERO, accessor=Accessor())
    table, expected = SparseTable(config), {}
    rng = np.random.default_rng(3)
    work = []
    for _ in range(4):
        batches = [np.unique(rng.zipf(1.3, 3000) % 40_000) for _ in range(40)]
        work.append([(keys, rng.integers(-4, 5, (len(keys), 4)).astype(np.float32)) for keys in batches])
        for keys, gradients in work[-1]:
            for key, row in zip(keys.tolist(), gradients, strict=True):
                expected[key] = expected.get(key, np.zeros(4, np.float32)) - row
    failures: list[BaseException] = []

    def push(batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        try:
            for keys, gradients in batches:
                table.pull(keys)
                table.push(keys, gradients)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=push, args=(batches,)) for batches in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    found = rows_of(table)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key][4] == tuple(row.tolist())
    total = sum(len(keys) for batches in work for keys, _ in batches)
    assert sum(row[5][0] for row in found.values()) == total


def test_threads_on_one_row_wait_for_each_other() -> None:
    """Without the lock of the sub-shard this loses updates at once, and new ids find a half-written index."""
    table = SparseTable(SparseTableConfig("t", 4, EXACT, initializer=ZERO))
    repeated, gradients = np.full(4000, 7), np.ones((4000, 4), np.float32)

    def push(seed: int) -> None:
        for round_ in range(60):
            table.push(repeated, gradients)
            make_rows(table, np.arange(200) * 4 + seed + 1000 * round_)

    threads = [threading.Thread(target=push, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert table.pull(np.array([7])).tolist() == [[-4.0 * 60 * 4000] * 4]
    assert (
        table.num_rows
        == len(table.keys())
        == len({7, *(i * 4 + seed + 1000 * r for i in range(200) for seed in range(4) for r in range(60))})
    )


Log = list[tuple[np.ndarray, np.ndarray]]


def _push_until(stop: threading.Event, table: SparseTable, log: Log, order: threading.Lock, seed: int) -> None:
    """Pushes integers, each written to the log first, as a server with a journal does."""
    rng = np.random.default_rng(seed)
    while not stop.is_set():
        keys = np.unique(rng.integers(0, 4000, 300))
        gradients = rng.integers(-3, 4, (len(keys), 3)).astype(np.float32)
        with table.gate.shared():
            with order:
                log.append((keys, gradients))
            table.push(keys, gradients)


def _save_under_load(table: SparseTable, folder: Path, windows: int) -> Log:
    log: Log = []
    order, stop = threading.Lock(), threading.Event()
    threads = [threading.Thread(target=_push_until, args=(stop, table, log, order, seed)) for seed in range(3)]
    for thread in threads:
        thread.start()
    plan, walk = table.plan_windows, table.blocks
    table.plan_windows = lambda n=0: plan(windows)  # type: ignore[method-assign, assignment]

    def blocks(**options: Any) -> Iterator[RowBlock]:
        """Lets a push in after some blocks, so that the save is under load however the threads are scheduled."""
        for number, block in enumerate(walk(**options)):
            yield block
            known, deadline = len(log), time.monotonic() + 10
            while number in (5, 10, 20, 40) and len(log) == known and time.monotonic() < deadline:
                time.sleep(0.001)

    table.blocks = blocks  # type: ignore[method-assign, assignment]
    try:
        save_table(table, folder, stamp=lambda: len(log))
    finally:
        table.blocks = walk  # type: ignore[method-assign]
        stop.set()
        for thread in threads:
            thread.join(60)
    return log


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "twins"])
def test_save_while_pushes_run(use_kernels: bool, tmp_path: Path) -> None:
    """Study 2d: each saved block holds exactly the pushes up to its stamp.

    Replaying the later ones of a log on the saved rows gives the live table, row for row, without a stop.
    """
    config = SparseTableConfig("t", 3, Rule("sgd", {"learning_rate": 1.0}), initializer=Initializer("uniform", -1, 1))
    table, fresh = (table_of(config, use_kernels) for _ in range(2))
    table.push(np.arange(0, 2000), np.ones((2000, 3), np.float32))
    log = _save_under_load(table, tmp_path, 40 if use_kernels else 10)
    rows: dict[int, np.ndarray] = {}
    known_until: dict[int, int] = {}
    folder = tmp_path / "t"
    for block in (block for part in read_parts(folder) for _, block in blocks_of(folder, part)):
        for key, row in zip(block.keys.tolist(), block.values, strict=True):
            assert key not in known_until
            rows[key], known_until[key] = row.copy(), block.stamp
    assert len(set(known_until.values())) > 3, "pushes went on between the blocks"
    for number, (keys, gradients) in enumerate(log, 1):
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            if number > known_until.get(key, 0):
                if key not in rows:
                    rows[key] = fresh.pull(np.array([key]))[0].copy()
                rows[key] -= gradient
    live = {key: row for block in table.blocks() for key, row in zip(block.keys.tolist(), block.values, strict=True)}
    assert rows.keys() == live.keys()
    for key, row in live.items():
        np.testing.assert_allclose(rows[key], row, atol=1e-4, err_msg=str(key))


def test_walk_meets_every_row_once_while_others_come_and_go() -> None:
    """D.8: rows that exist throughout are found once, however the index moves between windows."""
    table = SparseTable(SparseTableConfig("t", 1, EXACT, initializer=ZERO))
    stay, rng = np.arange(20_000), np.random.default_rng(0)
    for _ in range(3):
        table.push(stay, np.zeros((len(stay), 1), np.float32))
    seen: list[int] = []
    for number, window in enumerate(table.plan_windows(50)):
        seen += table.copy_window(window).keys.tolist()
        make_rows(table, np.unique(rng.integers(10**6, 10**9, 300)))
        if number % 50 == 0:
            table.shrink(threshold=2)
    kept = [key for key in seen if key < len(stay)]
    assert sorted(kept) == stay.tolist()
    assert len(set(seen)) == len(seen)


def test_a_load_finds_an_index_of_the_final_size(tmp_path: Path) -> None:
    """D.8: a save comes in the order of places, and in an index that grew under it each row would probe all others."""
    config = SparseTableConfig("t", 2, EXACT, initializer=ZERO)
    table, loaded = (SparseTable(config) for _ in range(2))
    make_rows(table, range(100_000))
    save_table(table, tmp_path)
    capacities: list[np.ndarray] = []
    insert = loaded.insert

    def watched(block: RowBlock) -> None:
        capacities.append(loaded._memory._shards[:, CAPACITY].copy())
        insert(block)

    loaded.insert = watched  # type: ignore[method-assign]
    assert load_table(loaded, tmp_path) == 100_000
    assert (capacities[0] == loaded._memory._shards[:, CAPACITY]).all()
    assert (capacities[0] * 3 // 4 > table._memory._shards[:, NUM_ENTRIES]).all()
