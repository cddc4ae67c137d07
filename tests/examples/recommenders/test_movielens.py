"""MovieLens's three formats give the same columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import fleet
from tests.examples.recommenders.example import example_module, only_this_example

ids = example_module("formats.ids")
movielens = example_module("formats.movielens")
sources = example_module("sources")

START = 978_300_000
GENRES = {10: "Drama|War", 11: "Comedy", 12: "Action|Sci-Fi"}


def ratings() -> list[tuple[int, int, int, int]]:
    """Returns user, film, rating and time of 60 ratings, not in time order."""
    found = [(n % 4, 10 + n % 3, 1 + n * 7 % 5, START + n * 3600) for n in range(60)]
    return found[30:] + found[:30]


def write_format(folder: Path, name: str) -> Path:
    """Writes the ratings and the films in one of the formats; returns the folder."""
    folder.mkdir()
    if name == "ratings.dat":
        lines = ["::".join(map(str, row)) for row in ratings()]
        films = "".join(f"{number}::Am\xe9lie, Part {number} (1995)::{genre}\n" for number, genre in GENRES.items())
        (folder / "movies.dat").write_text(films, encoding="latin-1")
    elif name == "ratings.csv":
        lines = ["userId,movieId,rating,timestamp", *(f"{u},{i},{r}.0,{t}" for u, i, r, t in ratings())]
        films = "".join(f'{number},"Am\xe9lie, Part {number} (1995)",{genre}\n' for number, genre in GENRES.items())
        (folder / "movies.csv").write_text(f"movieId,title,genres\n{films}", encoding="utf-8")
    else:
        lines = ["\t".join(map(str, row)) for row in ratings()]
        flags = {n: "|".join(str(int(genre in text)) for genre in movielens.GENRES) for n, text in GENRES.items()}
        films = "".join(f"{number}|Am\xe9lie (1995)|01-Jan-1995||http://x|{flags[number]}\n" for number in GENRES)
        (folder / "u.item").write_text(films, encoding="latin-1")
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def opened(source: Path, cache: Path) -> Path:
    with only_this_example():
        path: Path = sources.open_data(str(source), cache)
    return path


@pytest.mark.parametrize("name", movielens.RATINGS)
def test_a_format_is_read(name: str, tmp_path: Path) -> None:
    found = opened(write_format(tmp_path / "ml", name), tmp_path / "cache")
    table = pq.read_table(found / "impressions" / "train").to_pydict()
    assert len(table["time"]) == 54
    assert table["time"] == sorted(table["time"])
    assert table["time"][0] == START
    liked = [float(rating >= 4) for rating in table["rating"]]
    assert table["click"] == liked
    assert sorted(table["rating"][:5]) == [1, 2, 3, 4, 5]
    drama, comedy, action = ids.text_ids("category", ["Drama", "Comedy", "Action"]).tolist()
    assert table["category"][:3] == [drama, comedy, action]
    assert table["item"][:3] == ids.numbered_ids("item", np.array([10, 11, 12])).tolist()
    assert len(pq.read_table(found / "impressions" / "test")) == 6


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    folders = [opened(write_format(tmp_path / name, name), tmp_path / "cache") for name in movielens.RATINGS]
    for part in ("impressions", "items.parquet", "sequences/train", "sequences/test", "sessions"):
        tables = [pq.read_table(folder / part) for folder in folders]
        assert tables[0].equals(tables[1])
        assert tables[0].equals(tables[2])


def test_the_columns_are_those_of_a_shop_except_the_truth(folder: Path, tmp_path: Path) -> None:
    found = opened(write_format(tmp_path / "ml", "u.data"), tmp_path / "cache")
    for part in ("impressions/train", "items.parquet", "sequences/train", "sessions"):
        shop = next(iter(fleet.ParquetDataset(folder / part, batch_size=4)))
        batch = next(iter(fleet.ParquetDataset(found / part, batch_size=4)))
        assert {name: values.dtype for name, values in batch.items() if name != "rating"} == {
            name: values.dtype for name, values in shop.items() if not name.startswith("p_")
        }


def test_histories_hold_what_was_liked_before(tmp_path: Path) -> None:
    found = opened(write_format(tmp_path / "ml", "ratings.dat"), tmp_path / "cache")
    table = pq.read_table(found / "impressions").sort_by("time").to_pydict()
    past: dict[int, list[int]] = {}
    for user, item, click, history in zip(*(table[n] for n in ("user", "item", "click", "history")), strict=True):
        assert history == past.get(user, [])[-20:]
        if click:
            past.setdefault(user, []).append(item)
    sequences = pq.read_table(found / "sequences" / "test").to_pydict()
    assert dict(zip(sequences["user"], sequences["items"], strict=True)) == past
    train = pq.read_table(found / "sequences" / "train").to_pydict()
    assert train["items"] == [items[:-1] for items in sequences["items"]]


def test_without_films_there_are_no_genres(tmp_path: Path) -> None:
    folder = write_format(tmp_path / "ml", "ratings.csv")
    (folder / "movies.csv").unlink()
    found = opened(folder / "ratings.csv", tmp_path / "cache")
    assert set(pq.read_table(found / "impressions")["category"].to_pylist()) == {0}


@pytest.mark.parametrize(
    ("name", "text"), [("ratings.dat", "1::2::3\n"), ("ratings.csv", "a,b\n1,2,x,4\n"), ("u.data", "1\t2\t5\t9\n")]
)
def test_other_lines_are_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}'.*(are expected in each line|holds 1 ratings)"):
        opened(tmp_path, tmp_path / "cache")
