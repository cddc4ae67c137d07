from __future__ import annotations

import sys

import numpy as np
import pytest

from fleet.errors import ConfigError
from fleet.ps.serving.inverted_lists import InvertedLists, count_lists, import_faiss


def test_few_vectors_need_no_lists() -> None:
    assert [count_lists(n, None) for n in (0, 9_999, 10_000, 1_000_000)] == [0, 0, 200, 2000]
    assert [count_lists(n, 4) for n in (0, 155, 156, 10**6)] == [0, 0, 4, 4]


def test_lists_find_what_is_near_and_allowed() -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(2000, 8)).astype(np.float32)
    queries = random.normal(size=(50, 8)).astype(np.float32)
    live = random.random(2000) < 0.5
    products = np.where(live, queries @ vectors.T, -np.inf)
    wanted = [set(row[:10].tolist()) for row in np.argsort(-products, axis=1)]

    def found(nprobe: int | None) -> float:
        places = list(InvertedLists(vectors, 40, nprobe).nearest(queries, 10, live))
        assert all(live[one].all() and len(one) <= 10 for one in places)
        return sum(len(set(one.tolist()) & other) for one, other in zip(places, wanted, strict=True)) / 500

    assert found(40) == found(1000) == 1.0
    assert found(1) < 0.7 < found(None) < 1.0
    every = InvertedLists(vectors, 40, 40)
    assert [len(one) for one in every.nearest(queries[:2], 5000, live)] == 2 * [live.sum()]
    assert [len(one) for one in every.nearest(queries[:2], 10, np.zeros(2000, np.bool_))] == [0, 0]


def test_without_faiss_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"ItemIndex needs the package faiss; run .*'.\[retrieval\]'.*exact"):
        import_faiss("fleet.ps.ItemIndex")
