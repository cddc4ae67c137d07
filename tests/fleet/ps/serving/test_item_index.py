from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet.errors import ConfigError, FleetError
from fleet.ps import Initializer, ItemIndex, Reader, SparseTable, SparseTableConfig, release, roll_back, save_table
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.versions import Mark
from fleet.ps.serving import item_vectors
from fleet.ps.serving.item_index import InvertedLists
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain
from tests.fleet.ps.serving.test_item_vectors import nearest

ZEROS = Initializer("constant", 0.0)
QUERIES = np.random.default_rng(7).normal(size=(8, DIM)).astype(np.float32)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    made = Chain(FolderSink(tmp_path / "rows", "shop", "float32", fewest_rows=200), servers=2)
    made.write(150)
    return made


@pytest.fixture
def reader(tmp_path: Path, chain: Chain) -> Reader:
    return Reader(tmp_path / "rows")


def _wait(condition: Any) -> None:
    limit = threading.Event()
    for _ in range(6000):
        if condition():
            return
        limit.wait(0.01)
    raise AssertionError("a minute has passed")


def _unit(row: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(row.astype(np.float64))
    return (row / (length or 1.0)).astype(np.float32)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@pytest.mark.parametrize("arguments", [{}, {"kind": "ivf", "nlist": 4, "nprobe": 4}])
def test_after_every_refresh_answers_are_those_of_the_rows(
    chain: Chain, reader: Reader, metric: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With added, changed and deleted rows, bases made anew by the publisher and by the index, and a whole delta."""
    monkeypatch.setattr(item_vectors, "_FEWEST_DUE", 30)
    index = ItemIndex(reader, "ads", metric=metric, **arguments)
    random = np.random.default_rng(1)
    for number in range(25):
        if number:
            for _ in range(random.integers(0, 3)):
                chain.write(int(random.integers(0, 40)), int(random.integers(0, 40)), whole=number == 12)
            index.refresh()
        assert not index.refresh()
        items, queries = chain.rows, QUERIES
        if metric == "cosine":
            items = {key: _unit(row) for key, row in items.items()}
            queries = np.stack([_unit(row) for row in queries])
        assert len(index) == len(items)
        for k in (3, 1000):
            found = index.search(QUERIES, k)
            assert (found[0].tolist(), found[1].tolist()) == nearest(items, queries, k)
        assert index.recall(QUERIES, 10) == 1.0
        assert index.position == reader.position


def test_answers_while_rows_change_are_of_one_state(chain: Chain, reader: Reader) -> None:
    """Every delta gives all items one and the same row, so scores that differ are of two states."""
    keys, none = IDS[:100], IDS[:0]
    chain.put(0, keys, np.zeros((100, DIM), np.float32), none, whole=True)
    chain.put(1, none, np.zeros((0, DIM), np.float32), none, whole=True)
    failures: list[Any] = []
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            ids, scores = index.search(np.ones((1, DIM), np.float32), 200)
            real = scores[scores > -np.inf]
            if len(real) != 100 or len(np.unique(real)) != 1 or len(np.unique(ids[0, :100])) != 100:
                failures.append((ids, scores))

    with ItemIndex(reader, "ads").follow(0.001) as index:
        _wait(lambda: len(index) == 100)
        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        for value in range(1, 40):
            chain.put(0, keys, np.full((100, DIM), value, np.float32), none)
            _wait(lambda at=chain._watermarks[0]: index.position[0].watermark == at)
            assert index.search(np.ones((1, DIM), np.float32), 1)[1].tolist() == [[value * DIM]]
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert not any(thread.name.startswith("fleet-index") for thread in threading.enumerate())


def test_only_rows_that_changed_are_encoded(chain: Chain, reader: Reader) -> None:
    torch.manual_seed(0)
    tower = nn.Linear(DIM, 2)
    encoded: list[int] = []

    def encode(ids: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        encoded.extend(ids.tolist())
        return tower(torch.from_numpy(rows))

    def wanted() -> tuple[Any, Any]:
        with torch.no_grad():
            items = {key: tower(torch.from_numpy(row)[None])[0].numpy() for key, row in chain.rows.items()}
        return nearest(items, queries, 5)

    queries = np.ascontiguousarray(QUERIES[:, :2])
    index = ItemIndex(reader, "ads", encode=encode)
    assert sorted(encoded) == sorted(chain.rows)
    before = dict(chain.rows)
    encoded.clear()
    chain.write(20, 5)
    index.refresh()
    assert sorted(encoded) == sorted(key for key, row in chain.rows.items() if row is not before.get(key))
    assert index.search(queries, 5)[0].tolist() == wanted()[0]
    with torch.no_grad():
        tower.weight.mul_(-1)
    assert index.search(queries, 5)[0].tolist() != wanted()[0]
    encoded.clear()
    index.rebuild()
    assert sorted(encoded) == sorted(chain.rows)
    assert index.search(queries, 5)[0].tolist() == wanted()[0]


def test_all_items_are_encoded_anew_at_a_version(tmp_path: Path, chain: Chain, reader: Reader) -> None:
    """A version has a program of its own, so rows that are the same have other vectors."""
    for server in range(2):
        chain.sink.mark(server, Mark("monday", "key", 5))
    then = dict(chain.rows)
    chain.write(20, 5)

    def encode(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return rows if reader.version is None else -rows

    index = ItemIndex(reader, "ads", encode=encode)
    roll_back(tmp_path / "rows", "monday")
    assert index.version is None
    assert index.refresh()
    assert index.version is not None
    assert index.version.name == "monday"
    assert index.search(QUERIES, 5)[0].tolist() == nearest({key: -row for key, row in then.items()}, QUERIES, 5)[0]
    release(tmp_path / "rows")
    assert index.refresh()
    assert index.version is None
    assert index.search(QUERIES, 5)[0].tolist() == nearest(chain.rows, QUERIES, 5)[0]


@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy])
def test_ids_that_are_no_items_are_left_out(chain: Chain, reader: Reader, form: Any) -> None:
    sold = {-1, *range(0, 400, 3)}

    def keep(ids: np.ndarray) -> Any:
        return form(~np.isin(ids, list(sold)))

    def check() -> None:
        items = {key: row for key, row in chain.rows.items() if key not in sold}
        assert len(index) == len(items)
        assert index.search(QUERIES, 7)[0].tolist() == nearest(items, QUERIES, 7)[0]

    index = ItemIndex(reader, "ads", keep=keep)
    check()
    for _ in range(5):
        chain.write(40, 40)
        index.refresh()
        check()
    sold.update(range(-400, 0))
    index.rebuild()
    check()
    sold.clear()
    chain.put(0, np.array([-1]), np.full((1, DIM), 9, np.float32), IDS[:0])  # a change alone takes it back
    index.refresh()
    assert index.search(np.ones((1, DIM), np.float32), 1)[0].tolist() == [[-1]]


def test_lists_are_made_anew_while_items_change(chain: Chain, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes during that is in the new lists' answers, and ``rebuild`` during that is not undone."""
    monkeypatch.setattr(item_vectors, "_FEWEST_DUE", 30)
    held, begun, sign = threading.Event(), threading.Event(), [1.0]

    class Slow(InvertedLists):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if threading.current_thread().name == "fleet-index-lists":
                begun.set()
                assert held.wait(60)

    index = ItemIndex(reader, "ads", encode=lambda ids, rows: sign[0] * rows, kind="ivf", nlist=4, nprobe=4)
    monkeypatch.setattr("fleet.ps.serving.item_index.InvertedLists", Slow)
    with index.follow(0.001):
        for is_rebuilt in (False, True):
            held.clear()
            begun.clear()
            chain.write(100, 20)
            assert begun.wait(60)
            chain.write(5, 5)  # while the lists are made
            _wait(lambda: index.position == reader.position and len(index) == len(chain.rows))
            if is_rebuilt:
                sign[0] = -1.0
                index.rebuild()
            held.set()
            builder = index._builder
            assert builder is not None
            builder.join()
            items = {key: sign[0] * row for key, row in chain.rows.items()}
            assert index.search(QUERIES, 7)[0].tolist() == nearest(items, QUERIES, 7)[0]


@pytest.mark.parametrize("reader_follows", [False, True])
def test_a_brake_is_obeyed_long_before_the_next_round(
    tmp_path: Path, chain: Chain, reader: Reader, reader_follows: bool
) -> None:
    for server in range(2):
        chain.sink.mark(server, Mark("monday", "key", 5))
    older = dict(chain.rows)
    chain.write(30, 30)
    if reader_follows:
        reader.follow(0.01)
    with ItemIndex(reader, "ads") as index:
        index.refresh()
        assert index.search(QUERIES, 7)[0].tolist() == nearest(chain.rows, QUERIES, 7)[0]
        index.follow(3600)
        roll_back(tmp_path / "rows", "monday")
        _wait(lambda: index.search(QUERIES, 7)[0].tolist() == nearest(older, QUERIES, 7)[0])
        chain.write()
        release(tmp_path / "rows")
        _wait(lambda: index.search(QUERIES, 7)[0].tolist() == nearest(chain.rows, QUERIES, 7)[0])
    reader.close()


def test_ivf_finds_most_and_says_how_many(tmp_path: Path) -> None:
    table = SparseTable(SparseTableConfig("items", 8))
    random = np.random.default_rng(0)
    table.add(np.arange(3000), random.normal(size=(3000, 8)).astype(np.float32))
    save_table(table, tmp_path)
    queries = random.normal(size=(50, 8))
    recalls = [
        ItemIndex(Reader(tmp_path), "items", kind="ivf", nlist=50, nprobe=nprobe).recall(queries, 10)
        for nprobe in (1, 10, 50)
    ]
    assert recalls == sorted(recalls)
    assert recalls[0] < 0.6 < 0.8 < recalls[1] < recalls[2] == 1.0
    assert ItemIndex(Reader(tmp_path), "items", kind="ivf").recall(queries, 10) == 1.0  # too few for lists


def test_forms_of_queries(chain: Chain, reader: Reader) -> None:
    index = ItemIndex(reader, "ads")
    ids, scores = index.search(QUERIES, 3)
    for queries in (QUERIES.tolist(), QUERIES.astype(np.float64), np.asfortranarray(QUERIES)):
        assert index.search(queries, 3)[0].tolist() == ids.tolist()
    for dtype in (torch.float32, torch.float64):
        tensors = index.search(torch.tensor(QUERIES, dtype=dtype, requires_grad=True), 3)
        assert torch.equal(tensors[0], torch.from_numpy(ids))
        assert torch.equal(tensors[1], torch.from_numpy(scores))
    assert index.search(torch.ones(1, DIM, dtype=torch.bfloat16), 3)[0].shape == (1, 3)
    assert index.search(np.empty((0, DIM)), np.int64(3))[0].shape == (0, 3)
    assert index.search(np.ones((2, DIM), np.int32), 3)[1].shape == (2, 3)


def test_zeros_and_extremes_have_a_cosine(tmp_path: Path) -> None:
    table = SparseTable(SparseTableConfig("ads", 2, initializer=ZEROS))
    table.add(np.arange(5), np.array([[0, 0], [1e30, 1e30], [1e-30, 1e-30], [1, -1], [-2, -2]], np.float32))
    save_table(table, tmp_path)
    index = ItemIndex(Reader(tmp_path), "ads", metric="cosine")
    ids, scores = index.search([[1e-25, 1e-25], [0, 0], [3e30, 3e30]], 5)
    assert ids.tolist() == [[1, 2, 0, 3, 4], [0, 1, 2, 3, 4], [1, 2, 0, 3, 4]]
    assert scores[0].tolist() == pytest.approx([1, 1, 0, 0, -1], abs=1e-6)
    assert not scores[1].any()
    with pytest.raises(FleetError, match=r"ItemIndex\('ads'\): the vector of id 1 and 0 others have a NaN, or numbers"):
        ItemIndex(Reader(tmp_path), "ads")


def test_a_table_without_rows(tmp_path: Path) -> None:
    save_table(SparseTable(SparseTableConfig("ads", 2, initializer=ZEROS)), tmp_path)
    for encode in (None, lambda ids, rows: rows):
        index = ItemIndex(Reader(tmp_path), "ads", encode=encode)
        ids, scores = index.search([[1, 2]], 2)
        assert ids.tolist() == [[-1, -1]]
        assert scores.tolist() == [[-np.inf, -np.inf]]
        assert index.recall([[1, 2]], 2) == 1.0
        assert len(index) == 0


def test_a_vector_that_is_not_finite_leaves_the_items(
    chain: Chain, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    index = ItemIndex(reader, "ads")
    before = index.search(QUERIES, 5)[0].tolist()
    mine = next(key for key in chain.rows if key % 2 == 0)
    bad = np.full((1, DIM), np.nan, np.float32)
    chain.put(0, np.array([mine]), bad, IDS[:0])
    with pytest.raises(FleetError, match=f"the vector of id {mine} and 0 others have a NaN.*Training has diverged"):
        index.refresh()
    assert index.search(QUERIES, 5)[0].tolist() == before
    with caplog.at_level(logging.WARNING, "FLEET"), index.follow(0.001):
        _wait(lambda: "fleet.ps.ItemIndex('ads') keeps its items: " in caplog.text)
        assert index.search(QUERIES, 5)[0].tolist() == before
        chain.put(0, np.array([mine]), np.ones((1, DIM), np.float32), IDS[:0])
        _wait(lambda: index.position[0].watermark == chain._watermarks[0])
        assert index.search(QUERIES, 5)[0].tolist() == nearest(chain.rows, QUERIES, 5)[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"reader": "rows"}, r"reader='rows'\) takes a fleet.ps.Reader"),
        ({"table": "add"}, "no such table.*Did you mean 'ads'"),
        ({"encode": 7}, r"encode=7\) takes a function, or None"),
        ({"keep": [1]}, r"keep=\[1\]\) takes a function, or None"),
        ({"keep": lambda ids: ids}, r"keep returned int64 \[\d+\] for \d+ ids; it must return bools"),
        ({"keep": lambda ids: ids[1:] > 0}, r"keep returned bool \[\d+\] for \d+ ids; it must return bools"),
        ({"metric": "l2"}, r"metric='l2'\) takes one of \['inner_product', 'cosine'\]"),
        ({"kind": "hnsw"}, r"kind='hnsw'\) takes one of \['exact', 'ivf'\]"),
        ({"kind": "ivf", "nlist": 0}, "nlist=0.* takes an integer from 1, or None"),
        ({"kind": "ivf", "nprobe": 2.0}, "nprobe=2.0.* takes an integer from 1, or None"),
        ({"kind": "ivf", "nlist": 4, "nprobe": 5}, "nlist=4, nprobe=5.*at most as many"),
        ({"encode": lambda ids, rows: rows[:, :0]}, r"encode returned float32 \[\d+, 0\].*d from 1"),
        ({"nprobe": 2}, "nprobe=2.* is for kind=\"ivf\"; kind is 'exact'"),
        ({"encode": lambda ids, rows: rows[:-1]}, r"encode returned float32 \[\d+, 3\] for (\d+) ids; it must"),
        ({"encode": lambda ids, rows: ids}, "encode returned int64"),
    ],
)
def test_arguments_that_are_refused(reader: Reader, arguments: dict[str, Any], text: str) -> None:
    given = {"reader": reader, "table": "ads", **arguments}
    with pytest.raises(ConfigError, match=text):
        ItemIndex(given.pop("reader"), given.pop("table"), **given)


def test_searches_that_are_refused(reader: Reader) -> None:
    index = ItemIndex(reader, "ads")
    for queries, k, text in (
        (QUERIES, 0, r"k=0\) takes an integer from 1"),
        (QUERIES, True, "k=True"),
        (QUERIES, (1 << 20) + 1, r"k=1048577\) takes an integer from 1 to 1048576"),
        (QUERIES[0], 3, rf"queries are float32 \[{DIM}\]; they must be numbers \[n, {DIM}\]"),
        (QUERIES[:, :2], 3, r"queries are float32 \[8, 2\]"),
        ([["a"] * DIM], 3, "queries are <U1"),
        ([[1.0], [1.0, 2.0]], 3, "lists of unequal lengths"),
        (np.array([[0.0] * DIM, [np.nan] * DIM]), 3, "query 1 has a NaN"),
        (np.full((1, DIM), 1e300), 3, "query 0 has a NaN, or numbers without a finite length"),
    ):
        for call in (index.search, index.recall):
            with pytest.raises(ConfigError, match=text):
                call(queries, k)
    with pytest.raises(ConfigError, match=r"index.follow\(every_s=0\)"):
        index.follow(0)
    index.close()
    index.close()
    for call in (lambda: index.search(QUERIES, 1), index.refresh, index.rebuild, index.follow, lambda: index.position):
        with pytest.raises(ConfigError, match=r"ItemIndex\('ads'\) is closed"):
            call()
    assert reader.lookup("ads", [1]).shape == (1, DIM)


def test_an_encode_that_changes_its_columns_is_refused(chain: Chain, reader: Reader) -> None:
    columns = [2]
    index = ItemIndex(reader, "ads", encode=lambda ids, rows: rows[:, : columns[0]])
    columns[0] = 3
    chain.write()
    with pytest.raises(ConfigError, match=r"it must return floating-point numbers \[\d+, 2\]"):
        index.refresh()
    index.rebuild()
    assert index.search(QUERIES, 1)[0].shape == (8, 1)


def test_without_faiss_there_is_the_exact_kind(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert ItemIndex(reader, "ads").recall(QUERIES, 5) == 1.0
    with pytest.raises(ConfigError, match=r"ItemIndex\(kind=\"ivf\"\) needs the package faiss.*'.\[retrieval\]'"):
        ItemIndex(reader, "ads", kind="ivf")
