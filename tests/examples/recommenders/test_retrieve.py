"""retrieve.py answers over HTTP with items that change; nothing of a job is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.ps import Delta, Reader, RowsDelta, export
from fleet.ps.publishing.folder_sink import FolderSink
from tests.examples.asking import ask
from tests.examples.recommenders.example import example_module

NONE = np.empty(0, np.int64)
ITEMS = np.array([10**15, 7, 8, 9])
PRICES = np.array([0.0, 1.0, 2.0, 3.0])


class Tower(nn.Module):
    """The row of an id and, of items, the price as a third number."""

    def __init__(self, table: str, scale: float) -> None:
        super().__init__()
        self.table = table
        self.rows = fleet.SparseEmbedding(2, name=table)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.rows(batch[self.table])
        other = batch["price"].float() if "price" in batch else torch.ones_like(batch[self.table]).float()
        return torch.cat([rows, self.scale * other[:, None]], 1)


def write(folder: Path, number: int, items: dict[int, list[float]], gone: np.ndarray = NONE) -> None:
    user = RowsDelta("user", np.array([1]), np.ones((1, 2), np.float32), NONE)
    item = RowsDelta("item", np.array(list(items)), np.array(list(items.values()), np.float32).reshape(-1, 2), gone)
    delta = Delta("shop", 0, 1, "00000001-a", number - 1, number, number, 0.0, number == 1, (item, user))
    FolderSink(folder, "shop", "float32").write(delta)


def export_towers(folder: Path, scale: float) -> None:
    ids = torch.tensor([1, 2])
    export(Tower("user", 1.0), ({"user": ids},), folder / "user")
    export(Tower("item", scale), ({"item": ids, "price": torch.zeros(2, dtype=torch.float64)},), folder / "item")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    write(tmp_path / "rows", 1, {0: [9, 9], 10**15: [1, 0], 7: [1, 1], 8: [3, 1]})
    export_towers(tmp_path / "export", 0.0)
    pq.write_table(pa.table({"item": ITEMS, "price": PRICES, "other": PRICES}), tmp_path / "items.parquet")
    module = example_module("retrieve")
    stop = threading.Event()
    with Reader(tmp_path / "rows") as reader:
        catalogue = module.Catalogue.read(tmp_path / "items.parquet", ["item", "price"])
        retrieval = module.Retrieval(tmp_path / "export", reader, catalogue, "item", "exact")
        handler = module.module_of_wide_and_deep("json_requests").answering("/retrieve", retrieval.respond)
        towers = threading.Thread(target=retrieval.follow, args=(0.05, stop))
        towers.start()
        with retrieval.index.follow(0.01), ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
            stop.set()
            towers.join()
            server.shutdown()
            thread.join()


def wait_for(url: str, body: Any, wanted: dict[str, Any]) -> None:
    for _ in range(2000):
        status, answer = ask(url, body)
        if answer.items() >= wanted.items():
            break
    assert status == 200
    assert answer.items() >= wanted.items()
    assert answer["age_s"] > 1e9  # the deltas say that they were pushed in 1970


def test_answers_follow_rows_and_towers(tmp_path: Path, url: str) -> None:
    body = {"inputs": {"user": [1, 5]}, "k": 2}
    wait_for(url, body, {"items": [[8, 7], [7, 8]], "scores": [[4.0, 2.0], [0.0, 0.0]], "step": 1})
    write(tmp_path / "rows", 2, {10**15: [5, 1]}, np.array([7]))
    wait_for(url, body, {"items": [[10**15, 8], [8, 10**15]], "scores": [[6.0, 4.0], [0.0, 0.0]], "step": 2})
    export_towers(tmp_path / "export", 10.0)
    wait_for(url, {**body, "k": 5}, {"items": [[8, 10**15], [8, 10**15]], "scores": [[24.0, 6.0], [20.0, 0.0]]})


def test_what_is_no_request_is_answered_with_the_reason(url: str) -> None:
    for body, text in (
        ([], "TypeError"),
        ({}, "KeyError"),
        ({"inputs": []}, "AttributeError"),
        ({"inputs": {"user": [[1], [2, 3]]}}, "ValueError"),
        ({"inputs": {"user": [1.5]}}, "the program cannot take these inputs"),
        ({"inputs": {"age": [1]}}, "the program cannot take these inputs"),
        ({"inputs": {"user": [1]}, "k": 0}, "k=0"),
    ):
        status, answer = ask(url, body)
        assert status == 400, body
        assert text in answer["error"]
    assert ask(url.replace("retrieve", "items"), {})[0] == 404


def test_columns_of_items() -> None:
    catalogue = example_module("retrieve").Catalogue({"item": torch.tensor([9, 7]), "price": torch.tensor([1.0, 2.0])})
    assert catalogue.batch(torch.tensor([7, 9, 7]))["price"].tolist() == [2.0, 1.0, 2.0]
    assert catalogue.has(torch.tensor([7, 8, 10, 9])).tolist() == [True, False, False, True]
