"""The simulated shop is what it says: its probabilities are true, and its items, tastes and histories move in time."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.examples.recommenders.example import EXAMPLE, example_module
from tests.helpers.scikit_learn import roc_auc_score

files = example_module("simulator.files")
settings = example_module("simulator.settings")
truth = example_module("simulator.truth")

Columns = dict[str, Any]


def columns_of(path: Path) -> Columns:
    """Returns the columns of Parquet files; a list column is an array of arrays."""
    table = pq.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


@pytest.fixture(scope="module")
def train(folder: Path) -> Columns:
    return columns_of(folder / "impressions" / "train")


@pytest.fixture(scope="module")
def held_out(folder: Path) -> Columns:
    return columns_of(folder / "impressions" / "test")


def test_the_same_settings_write_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    sizes = {"users": 300, "items": 600, "days": 3, "impressions": 5000}
    line = [sys.executable, str(EXAMPLE / "simulate.py"), "there", "--seed", "1"]
    line += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    subprocess.run(line, cwd=tmp_path, check=True, timeout=120)
    for name, seed in (("here", 1), ("other", 2)):
        files.write_shop(files.simulate(settings.Settings(**sizes, seed=seed)), tmp_path / name)
    names = [path.relative_to(tmp_path / "here") for path in sorted((tmp_path / "here").rglob("*.parquet"))]
    assert len(names) == 7
    assert filecmp.cmpfiles(tmp_path / "here", tmp_path / "there", names, shallow=False)[0] == names
    assert filecmp.cmpfiles(tmp_path / "here", tmp_path / "other", names, shallow=False)[0] == []


def test_columns_have_their_types(folder: Path) -> None:
    schema = pq.read_schema(folder / "impressions" / "train" / "day-00.parquet")
    assert {field.name: str(field.type) for field in schema} == {
        **dict.fromkeys(("time", "user", "item", "category", "brand", "age", "hour", "position"), "int64"),
        **dict.fromkeys(("history", "history_category"), "list<element: int64>"),
        **dict.fromkeys(("price", "click", "purchase", "p_click", "p_purchase"), "float"),
    }


def test_days_are_files_in_time_order_and_the_last_one_is_the_test(
    folder: Path, train: Columns, held_out: Columns
) -> None:
    assert len(train["time"]) + len(held_out["time"]) == 100_000
    assert (np.diff(train["time"]) >= 0).all()
    assert train["time"].max() < held_out["time"].min()
    assert set((held_out["time"] - settings.START_S) // settings.DAY_S) == {3}
    assert [path.name for path in sorted((folder / "impressions" / "train").iterdir())] == [
        "day-00.parquet",
        "day-01.parquet",
        "day-02.parquet",
    ]
    assert (train["hour"] == train["time"] // 3600 % 24).all()


def test_ids_use_64_bits_and_kinds_share_none(train: Columns) -> None:
    kinds = [set(train[name].tolist()) for name in ("user", "item", "category", "brand")]
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    assert train["item"].min() < -(1 << 62)
    assert train["item"].max() > 1 << 62


def test_clicks_and_purchases_are_as_rare_as_in_shops(train: Columns) -> None:
    assert 0.05 < train["click"].mean() < 0.25
    assert 0.05 < train["purchase"].sum() / train["click"].sum() < 0.3
    assert not train["purchase"][train["click"] == 0].any()


@pytest.mark.parametrize(("outcome", "probability"), [("click", "p_click"), ("purchase", "p_purchase")])
def test_the_probabilities_are_true(train: Columns, outcome: str, probability: str) -> None:
    """In 20 buckets of equal size, outcomes are as many as the probabilities say, within 4 standard deviations."""
    rows = np.flatnonzero(train["click"] > 0) if outcome == "purchase" else np.arange(len(train["click"]))
    p = train[probability][rows].astype(np.float64)
    for bucket in np.array_split(np.argsort(p, kind="stable"), 20):
        deviation = np.sqrt((p[bucket] * (1 - p[bucket])).sum())
        assert abs(train[outcome][rows][bucket].sum() - p[bucket].sum()) < 4 * deviation


def test_positions_are_examined_less_the_lower_they_are(train: Columns) -> None:
    """Of items that are liked alike, those at the top are clicked more: by the ratio that the truth says."""
    liking = train["p_click"] / truth.EXAMINATION[train["position"]]
    likes = (liking > 0.1) & (liking < 0.4)
    rates = [train["click"][likes & (train["position"] == position)].mean() for position in (0, 9)]
    means = [liking[likes & (train["position"] == position)].mean() for position in (0, 9)]
    assert rates[0] / means[0] == pytest.approx(1.0, abs=0.1)
    assert rates[1] / means[1] == pytest.approx(10**-0.5, abs=0.06)


def test_each_page_shows_different_items(train: Columns) -> None:
    pages = train["item"].reshape(-1, settings.PAGE)
    assert (np.diff(np.sort(pages, axis=1), axis=1) != 0).all()
    assert (train["position"].reshape(pages.shape) == np.arange(settings.PAGE)).all()
    assert (train["user"].reshape(pages.shape) == train["user"].reshape(pages.shape)[:, :1]).all()


def test_items_appear_and_vanish_and_are_shown_only_between(folder: Path, train: Columns, held_out: Columns) -> None:
    items = columns_of(folder / "items.parquet")
    order = np.argsort(items["item"])
    for rows in (train, held_out):
        place = order[np.searchsorted(items["item"], rows["item"], sorter=order)]
        day = (rows["time"] - settings.START_S) // settings.DAY_S
        assert (items["first_day"][place] <= day).all()
        assert (day <= items["last_day"][place]).all()
    unseen = ~np.isin(held_out["item"], train["item"])
    assert 0.01 < unseen.mean() < 0.3
    first_day = train["item"][train["time"] < settings.START_S + settings.DAY_S]
    assert (items["last_day"][np.isin(items["item"], first_day)] < 3).mean() > 0.1


def test_few_items_are_shown_often(folder: Path) -> None:
    shown = np.sort(columns_of(folder / "items.parquet")["shown"])[::-1]
    assert shown[:200].sum() > 0.3 * shown.sum()


def test_counts_of_items_are_of_the_days_before_the_test(folder: Path, train: Columns) -> None:
    items = columns_of(folder / "items.parquet")
    found, counts = np.unique(train["item"], return_counts=True)
    assert dict(zip(found, counts, strict=True)) == {
        item: shown for item, shown in zip(items["item"], items["shown"], strict=True) if shown
    }
    assert items["clicked"].sum() == train["click"].sum()


def test_histories_hold_the_last_20_clicks_before_the_page(train: Columns) -> None:
    clicked: dict[int, list[tuple[int, int, int]]] = {}
    checked = 0
    for row in range(20_000):
        user, time = train["user"][row], train["time"][row]
        past = [entry for entry in clicked.get(user, []) if entry[0] < time][-20:]
        assert train["history"][row].tolist() == [item for _, item, _ in past]
        assert train["history_category"][row].tolist() == [category for *_, category in past]
        checked += len(past) > 0
        if train["click"][row]:
            clicked.setdefault(user, []).append((time, train["item"][row], train["category"][row]))
    assert checked > 5000


def test_tastes_drift(shop: Any) -> None:
    """A taste resembles yesterday's more than the one three days ago."""
    tastes = shop.users.tastes
    near = np.abs(tastes[1:] - tastes[:-1]).sum(axis=2).mean()
    far = np.abs(tastes[3] - tastes[0]).sum(axis=1).mean()
    others = np.abs(tastes[0] - tastes[0][::-1]).sum(axis=1).mean()
    assert 0.1 < near < 0.8 * far < 0.8 * others


def test_the_best_is_above_what_popularity_reaches(folder: Path, held_out: Columns) -> None:
    items = columns_of(folder / "items.parquet")
    rate = (items["clicked"] + 2) / (items["shown"] + 20)
    order = np.argsort(items["item"])
    score = rate[order[np.searchsorted(items["item"], held_out["item"], sorter=order)]]
    best = truth.best_aucs(held_out)
    assert best.click == pytest.approx(roc_auc_score(held_out["click"], held_out["p_click"]))
    assert roc_auc_score(held_out["click"], score) + 0.1 < best.click_without_position < best.click < 0.9
    assert best.purchase > 0.7
    assert best.click_and_purchase > best.click


def test_sequences_end_with_the_item_to_predict(folder: Path, train: Columns, held_out: Columns) -> None:
    clicked: dict[int, list[int]] = {}
    for rows in (train, held_out):
        before = {user: len(items) for user, items in clicked.items()}
        hits = np.flatnonzero(rows["click"])
        for user, item in zip(rows["user"][hits], rows["item"][hits], strict=True):
            clicked.setdefault(user, []).append(item)
    found = columns_of(folder / "sequences" / "train")
    wanted = {user: clicked[user][:count] for user, count in before.items() if count >= 3}
    assert {user: items.tolist() for user, items in zip(*found.values(), strict=True)} == wanted
    found = columns_of(folder / "sequences" / "test")
    wanted = {user: items[: before.get(user, 0) + 1] for user, items in clicked.items()}
    active = set(held_out["user"][held_out["click"] > 0])
    wanted = {user: items for user, items in wanted.items() if user in active and len(items) >= 3}
    assert {user: items.tolist() for user, items in zip(*found.values(), strict=True)} == wanted


def test_items_of_a_session_are_alike(folder: Path) -> None:
    """Two items of one session share a category more often than items of different sessions: there is a meaning."""
    items = columns_of(folder / "items.parquet")
    category = dict(zip(items["item"], items["category"], strict=True))
    sessions = columns_of(folder / "sessions")["items"]
    assert min(map(len, sessions)) >= 2
    firsts = np.array([category[session[0]] for session in sessions])
    seconds = np.array([category[session[1]] for session in sessions])
    assert (firsts == seconds).mean() > 2 * (firsts == np.roll(seconds, 1)).mean()


@pytest.mark.parametrize("wrong", [{"users": 0}, {"days": 1}, {"items": 10}, {"impressions": 5}, {"seed": -1}])
def test_sizes_that_make_no_shop_are_refused(wrong: dict[str, int]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"--{name} {value}: at least"):
        settings.Settings(**wrong)


def test_a_shop_is_not_written_over_another(shop: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="holds a simulated shop already"):
        files.write_shop(shop, folder)
