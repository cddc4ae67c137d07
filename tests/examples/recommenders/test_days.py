"""The days of the demonstration: what is trained, the day that goes wrong, and the clicks that come next."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import torch

from tests.examples.recommenders.example import example_module

days = example_module("days")


def test_a_day_is_read_in_time_order_with_candidates_of_that_day(folder: Path) -> None:
    table = pq.read_table(folder / "impressions/train/day-01.parquet")
    batches = list(days.Days(folder).batches(1, 500, 32))
    assert torch.cat([batch["user"] for batch in batches]).tolist() == table["user"].to_pylist()[: 500 * len(batches)]
    assert torch.cat([batch["item"] for batch in batches]).tolist() == table["item"].to_pylist()[: 500 * len(batches)]
    shown = set(table["item"].to_pylist())
    assert all(set(batch["negative.item"].tolist()) <= shown for batch in batches)
    assert all(len(batch["negative.item"]) == len(batch["negative.log_q"]) == 32 for batch in batches)


def test_a_broken_day_names_other_items_with_their_own_columns(folder: Path) -> None:
    shop = days.Days(folder)
    good, broken = (next(iter(shop.batches(1, 500, 0, broken=broken))) for broken in (False, True))
    assert torch.equal(good["user"], broken["user"])
    assert not (good["item"] == broken["item"]).any()
    items = shop.catalogue
    places = torch.searchsorted(items.item, broken["item"])
    for name, values in items.columns(places).items():
        assert torch.equal(broken[name], values)


def test_clicks_are_those_of_the_day_with_their_histories(folder: Path) -> None:
    shop = days.Days(folder)
    for day, part in ((2, "train/day-02"), (3, "test/day-03")):
        rows = [row for row in pq.read_table(folder / f"impressions/{part}.parquet").to_pylist() if row["click"]]
        found = shop.clicks(day, 10**9)
        assert found["item"].tolist() == [row["item"] for row in rows]
        assert found["history"].tolist() == [item for row in rows for item in row["history"]]
        assert len(shop.clicks(day, 7)["user"]) == 7


def test_events_of_several_writers_are_in_time_order(tmp_path: Path) -> None:
    events = example_module("events").Events(tmp_path / "events.jsonl")
    assert events.read() == []
    for number in range(3):
        events.add("day" if number else "marked", day=number)
    assert [one["day"] for one in events.read()] == [0, 1, 2]
    assert [one["day"] for one in events.read("day")] == [1, 2]
