"""MovieLens's files: ratings.dat, ratings.csv and u.data, each with the films beside it.

A rating of 4 and more counts as a click, a lower one as an impression without. The last tenth of the ratings, in time
order, is the test. Columns of a shop that MovieLens does not have are constant, so that every model runs; there are no
true probabilities.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from formats.columns import Columns, Lists, write_columns
from formats.histories import Clicks, clicks_of_users, histories, sorted_clicks
from formats.ids import numbered_ids, text_ids

Integers = NDArray[np.int64]

RATINGS = ("ratings.dat", "ratings.csv", "u.data")
LIKED = 4.0
HISTORY = 20
SHORTEST = 3
TEST_SHARE = 0.1
DAY_S = 86_400
GENRES = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]  # of u.item, in order


class Ratings(NamedTuple):
    """Ratings in time order.

    Args:
        user, item: int64 [ratings], places in the distinct numbers.
        time: int64 [ratings], seconds since 1970.
        liked: bool [ratings].
        rating: float32 [ratings].
        users, items: int64, the distinct numbers.
    """

    user: Integers
    item: Integers
    time: Integers
    liked: NDArray[np.bool_]
    rating: NDArray[np.float32]
    users: Integers
    items: Integers

    def clicks(self, rows: slice = slice(None)) -> Clicks:
        """Returns the liked ones of some rows."""
        liked = self.liked[rows]
        user, time, item = (column[rows][liked] for column in (self.user, self.time, self.item))
        return sorted_clicks(user, np.zeros_like(user), time, item)


def ratings_file(path: Path) -> Path | None:
    """Returns the file of ratings that a path names, or that is in the folder it names; ``None`` if there is none."""
    files = [path] if path.is_file() else [path / name for name in RATINGS]
    return next((file for file in files if file.name in RATINGS and file.is_file()), None)


def write_movielens(path: Path, folder: Path) -> None:
    """Writes the ratings in the layout of a shop.

    Args:
        path: the file of ratings.
        folder: where to.

    Raises:
        ValueError: a file is not in the format.
    """
    ratings = read_ratings(path)
    genres = read_genres(path.parent)
    item_ids = numbered_ids("item", ratings.items)
    genre_ids = text_ids("category", [genres.get(int(number), "") for number in ratings.items])
    first = len(ratings.user) - max(1, int(len(ratings.user) * TEST_SHARE))
    for name, rows in (("train", slice(first)), ("test", slice(first, None))):
        columns = _impressions(ratings, rows, item_ids, genre_ids)
        write_columns(folder / "impressions" / name / "part-0.parquet", columns)
    train, test = _sequences(ratings, item_ids)
    write_columns(folder / "sequences" / "train" / "part-0.parquet", train)
    write_columns(folder / "sequences" / "test" / "part-0.parquet", test)
    write_columns(folder / "sessions" / "part-0.parquet", {"items": train["items"]})
    write_columns(folder / "items.parquet", _items(ratings, slice(first), item_ids, genre_ids))
    facts = {"source": path.name, "days": int(_days(ratings)[-1]) + 1}
    (folder / "shop.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def read_ratings(path: Path) -> Ratings:
    """Returns the ratings of a file in time order.

    Raises:
        ValueError: a line is not in the format, or there are fewer than two; the message names the file.
    """
    text = path.read_bytes()
    # One character between fields, whatever the file has; titles, which could hold it, are in other files.
    text = text.replace(b"::", b",") if path.suffix == ".dat" else text.replace(b"\t", b",")
    skipped = int(path.suffix == ".csv")
    types = {"user": pa.int64(), "item": pa.int64(), "rating": pa.float32(), "time": pa.int64()}
    try:
        table = pyarrow.csv.read_csv(
            io.BytesIO(text),
            pyarrow.csv.ReadOptions(column_names=list(types), skip_rows=skipped, use_threads=False),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types, null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise ValueError(f"{str(path)!r}: user, item, rating and time are expected in each line: {error}") from error
    if len(table) < 2:
        raise ValueError(f"{str(path)!r} holds {len(table)} ratings; at least 2 are needed.")
    table = table.take(np.argsort(table["time"].to_numpy(), kind="stable"))
    users, user = np.unique(table["user"].to_numpy(), return_inverse=True)
    items, item = np.unique(table["item"].to_numpy(), return_inverse=True)
    rating = table["rating"].to_numpy()
    return Ratings(user, item, table["time"].to_numpy(), rating >= LIKED, rating, users, items)


def read_genres(folder: Path) -> Mapping[int, str]:
    """Returns the first genre of each film, from movies.dat, movies.csv or u.item; none without such a file."""
    if (folder / "movies.dat").exists():
        lines = (folder / "movies.dat").read_text(encoding="latin-1").splitlines()
        rows = [line.split("::") for line in lines]
    elif (folder / "movies.csv").exists():
        with (folder / "movies.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
    elif (folder / "u.item").exists():
        lines = (folder / "u.item").read_text(encoding="latin-1").splitlines()
        return {int(line.split("|")[0]): _flagged(line.split("|")[-len(GENRES) :]) for line in lines}
    else:
        return {}
    return {int(row[0]): row[-1].split("|")[0] for row in rows}


def _flagged(flags: list[str]) -> str:
    return next((genre for genre, flag in zip(GENRES, flags, strict=True) if flag == "1"), "")


def _days(ratings: Ratings) -> Integers:
    return (ratings.time - ratings.time[0]) // DAY_S


def _impressions(ratings: Ratings, rows: slice, item_ids: Integers, genre_ids: Integers) -> Columns:
    user, item, time = ratings.user[rows], ratings.item[rows], ratings.time[rows]
    clicks = ratings.clicks()
    past = histories(clicks, user, time, HISTORY)
    clicked = clicks.item[past.values]
    nothing = np.zeros(len(user), np.int64)
    return {
        "time": time,
        "user": numbered_ids("user", ratings.users)[user],
        "item": item_ids[item],
        "category": genre_ids[item],
        "brand": nothing,
        "age": nothing,
        "hour": time % DAY_S // 3600,
        "position": nothing,
        "price": np.ones(len(user), np.float32),
        "history": Lists(item_ids[clicked], past.offsets),
        "history_category": Lists(genre_ids[clicked], past.offsets),
        "click": ratings.liked[rows].astype(np.float32),
        "purchase": nothing.astype(np.float32),
        "rating": ratings.rating[rows],
    }


def _sequences(ratings: Ratings, item_ids: Integers) -> tuple[Columns, Columns]:
    """Returns what each user liked: all but the last film, and all; the last one is the one to predict."""
    clicks = ratings.clicks()
    whole = clicks_of_users(clicks, SHORTEST + 1)
    user = numbered_ids("user", ratings.users)[clicks.user[whole.values[whole.offsets[:-1]]]]
    items = item_ids[clicks.item[whole.values]]
    is_last = np.zeros(len(items), bool)
    is_last[whole.offsets[1:] - 1] = True
    without = Lists(items[~is_last], whole.offsets - np.arange(len(whole.offsets)))
    return {"user": user, "items": without}, {"user": user, "items": Lists(items, whole.offsets)}


def _items(ratings: Ratings, train: slice, item_ids: Integers, genre_ids: Integers) -> Columns:
    count = len(item_ids)
    _, first = np.unique(ratings.item, return_index=True)
    item = ratings.item[train]
    return {
        "item": item_ids,
        "category": genre_ids,
        "brand": np.zeros(count, np.int64),
        "price": np.ones(count, np.float32),
        "first_day": _days(ratings)[first],
        "last_day": np.full(count, _days(ratings)[-1]),
        "shown": np.bincount(item, minlength=count),
        "clicked": np.bincount(item[ratings.liked[train]], minlength=count),
    }
