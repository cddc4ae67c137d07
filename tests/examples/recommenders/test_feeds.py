"""Batches: each worker's share in plain torch, pairs of sessions, negatives, and their probabilities."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from tests.examples.recommenders.example import example_module

feeds = example_module("feeds")
catalogue = example_module("catalogue")


def feed(name: str, folder: Path, share: tuple[int, int] | None = (0, 1), **settings: Any) -> Any:
    sampling = feeds.Sampling(**settings)
    return feeds.Feed(name, folder, ("user", "item"), sampling, 64, 3, 4, share)


def small_catalogue(power: float = 0.75) -> Any:
    columns = {
        "item": [30, 10, 20],
        "category": [3, 1, 2],
        "brand": [3, 1, 2],
        "price": [3.0, 1.0, 2.0],
        "shown": [81, 1, 16],
        "clicked": [40, 0, 2],
        "first_day": [0, 0, 5],
        "last_day": [9, 3, 9],
    }
    return catalogue.Catalogue({name: np.array(values) for name, values in columns.items()}, 4, power)


def test_shares_divide_each_pass_as_the_workers_of_a_job_do(folder: Path) -> None:
    """test_train.py holds that a job trains on the same batches."""
    shares = [feed("deepfm", folder, (number, 2)) for number in range(2)]
    whole = fleet.ParquetDataset(folder / "impressions/train", columns=["user"], batch_size=64, shuffle_seed=3)
    for epoch in range(2):
        whole.set_epoch(epoch)
        rows = torch.cat([batch["user"] for batch in whole])
        half = len(rows) // 2
        for start, share in zip((0, half), shares, strict=True):
            share.begin(epoch)
            found = torch.cat([batch["user"] for batch in share])
            assert torch.equal(found, rows[start : start + 4 * 64])


def test_sequences_become_rectangles(folder: Path) -> None:
    one = feed("sasrec", folder, negatives=3, length=20)
    one.begin(0)
    batch = next(iter(one))
    assert batch["items"].shape == (64, 20)
    assert batch["negative"].shape == (3,)
    assert bool((batch["items"][:, :3] != 0).all())


def test_the_passes_differ_and_end(folder: Path) -> None:
    found = feed("deepfm", folder)
    passes = []
    for epoch in range(2):
        found.begin(epoch)
        passes.append([batch["user"].tolist() for batch in found])
    assert [len(batches) for batches in passes] == [4, 4]
    assert passes[0] != passes[1]


def test_pairs_stay_within_a_session_and_the_window() -> None:
    items, offsets = torch.tensor([1, 2, 3, 4, 9, 8]), torch.tensor([0, 4])
    centre, context = feeds.pairs(items, offsets, 2)
    found = set(zip(centre.tolist(), context.tolist(), strict=True))
    near = {(1, 2), (2, 3), (3, 4), (1, 3), (2, 4), (9, 8)}
    assert found == near | {(b, a) for a, b in near}
    assert len(centre) == len(found)


def test_draws_follow_the_power_of_the_counts() -> None:
    shop = small_catalogue()
    places = shop.drawn(np.random.default_rng(0), 36_000)
    counts = Counter(shop.item[places].tolist())
    # 1, 8 and 27 of 36: the counts 1, 16 and 81 to the power of 3/4.
    assert [counts[item] for item in (10, 20, 30)] == pytest.approx([1000, 8000, 27000], rel=0.1)
    assert shop.log_drawn(torch.tensor([0, 1, 2])).exp().tolist() == pytest.approx([1 / 36, 8 / 36, 27 / 36])
    assert small_catalogue(0.0).log_drawn(torch.tensor([0, 2])).exp().tolist() == pytest.approx([1 / 3, 1 / 3])


def test_the_catalogue_knows_each_item() -> None:
    shop = small_catalogue()
    assert shop.log_shown(torch.tensor([30, 10])).exp().tolist() == pytest.approx([81 / 98, 1 / 98])
    assert shop.columns(torch.tensor([2, 0]))["price"].tolist() == [3.0, 1.0]
    assert shop.item[shop.on_sale(4)].tolist() == [30]
    assert shop.clicked(torch.tensor([0, 2])).tolist() == [0, 40]
    mean = 42 / 98  # of all items; as much as 20 more impressions say
    expected = [(0 + 20 * mean) / 21, (2 + 20 * mean) / 36, (40 + 20 * mean) / 101]
    assert shop.click_rate(torch.tensor([10, 20, 30])).tolist() == pytest.approx(expected)


def test_negatives_of_dssm_have_the_columns_of_their_items(folder: Path) -> None:
    one = feed("dssm", folder, negatives=7)
    one.begin(0)
    batch = next(iter(one))
    shop = catalogue.Catalogue.read(folder)
    places = torch.searchsorted(shop.item, batch["negative.item"])
    for name, values in shop.columns(places).items():
        assert torch.equal(batch[f"negative.{name}"], values)
    torch.testing.assert_close(batch["negative.log_q"], shop.log_drawn(places))
    torch.testing.assert_close(batch["log_q"], shop.log_shown(batch["item"]))


def test_word2vec_draws_items_for_each_pair(folder: Path) -> None:
    one = feed("word2vec", folder, negatives=3)
    one.begin(0)
    batch = next(iter(one))
    assert batch["negative"].shape == (len(batch["centre"]), 3)
    assert batch["centre"].shape == batch["context"].shape
    assert bool(torch.isin(batch["negative"], catalogue.Catalogue.read(folder).item).all())
