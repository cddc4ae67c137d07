"""serve.py answers over HTTP with rows that change; nothing of a job is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet import fleet
from fleet.ps import Delta, Predictor, Reader, RowsDelta, export
from fleet.ps.publishing.folder_sink import FolderSink
from tests.examples.asking import ask
from tests.examples.wide_and_deep.example import example_module

NONE = np.empty(0, np.int64)


class Network(nn.Module):
    """The sum of the rows of a sample, and of its dense numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = fleet.SparseEmbedding(1, name="ads", combiner="sum")

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(ids).squeeze(1) + dense.sum(1)
        return found


def write(sink: FolderSink, number: int) -> None:
    rows = RowsDelta("ads", np.array([7]), np.full((1, 1), number, np.float32), NONE)
    sink.write(Delta("shop", 0, 1, "00000001-a", number - 1, number, number, 0.0, number == 1, (rows,)))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    write(FolderSink(tmp_path / "rows", "shop", "float32"), 1)
    export(Network(), (torch.tensor([[7], [8]]), torch.zeros(2, 2)), tmp_path / "export")
    with Reader(tmp_path / "rows").follow(0.01) as reader:
        module = example_module("serve")
        handler = module.answering("/predict", partial(module.predict, Predictor(tmp_path / "export", reader)))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}/predict"
            server.shutdown()
            thread.join()


def test_answers_follow_the_rows(tmp_path: Path, url: str) -> None:
    body = {"ids": [[7], [8]], "dense": [[0.5, 0.5], [0.0, 0.0]]}
    status, answer = ask(url, body)
    assert (status, answer["step"]) == (200, 1)
    assert answer["probability"] == pytest.approx([torch.sigmoid(torch.tensor(2.0)).item(), 0.5])
    write(FolderSink(tmp_path / "rows", "shop", "float32"), 2)
    for _ in range(1000):
        status, answer = ask(url, body)
        if answer["step"] == 2:
            break
    assert answer["probability"] == pytest.approx([torch.sigmoid(torch.tensor(3.0)).item(), 0.5])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "KeyError"),
        ({"ids": "x", "dense": []}, "Error"),
        ({"ids": [[7]], "dense": [[1.0], [2.0]]}, "exported for int64 [a, "),
        ([], "Error"),
    ],
)
def test_bad_requests_are_told_so(url: str, body: Any, text: str) -> None:
    status, answer = ask(url, body)
    assert status == 400
    assert text in answer["error"]
    assert ask(url.replace("predict", "other"), {})[0] == 404
