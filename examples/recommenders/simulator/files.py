"""The Parquet files of a simulated shop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from formats.columns import Columns, Lists, write_columns
from formats.histories import Clicks, clicks_of_sessions, clicks_of_users, histories, sorted_clicks
from numpy.typing import NDArray

from simulator.items import Items, make_items
from simulator.sessions import Pages, Shown, make_pages, show_day
from simulator.settings import DAY_S, PAGE, START_S, Settings
from simulator.users import Users, make_users

HISTORY = 20
SHORTEST_SEQUENCE = 3
SHORTEST_SESSION = 2


class Shop(NamedTuple):
    """Everything that happened in a simulated shop.

    Args:
        settings: the sizes.
        users, items: who and what.
        pages: all pages, in time order.
        shown: what they showed, and what came of it.
    """

    settings: Settings
    users: Users
    items: Items
    pages: Pages
    shown: Shown

    def clicks(self, days: int) -> Clicks:
        """Returns the clicks of the first days."""
        page, position = np.nonzero(self.shown.click[: self.first_page(days)])
        pages = self.pages
        return sorted_clicks(pages.user[page], pages.session[page], pages.second[page], self.shown.item[page, position])

    def first_page(self, day: int) -> int:
        """Returns the place of a day's first page."""
        return int(np.searchsorted(self.pages.second, day * DAY_S))


def simulate(settings: Settings) -> Shop:
    """Returns what happens in a shop; the same for the same settings."""
    users = make_users(settings)
    items = make_items(settings)
    pages = make_pages(settings, users)
    bounds = np.searchsorted(pages.second, np.arange(settings.days + 1) * DAY_S)
    shown = []
    for day in range(settings.days):
        today = pages.part(slice(bounds[day], bounds[day + 1]))
        shown.append(show_day(settings, users, items, today, day))
    columns = zip(*shown, strict=True)
    return Shop(settings, users, items, pages, Shown(*(np.concatenate(column) for column in columns)))


def write_shop(shop: Shop, folder: Path) -> None:
    """Writes the files of a shop: impressions, sequences, sessions, items, and the settings.

    Raises:
        ValueError: the folder holds a shop already.
    """
    if (folder / "shop.json").exists():
        raise ValueError(f"{str(folder)!r} holds a simulated shop already; give another folder, or remove it.")
    days = shop.settings.days
    clicks = shop.clicks(days)
    for day in range(days):
        part = "test" if day == days - 1 else "train"
        write_columns(folder / "impressions" / part / f"day-{day:02d}.parquet", impressions_of(shop, clicks, day))
    for name, columns in sequences_of(shop).items():
        write_columns(folder / "sequences" / name / "part-0.parquet", columns)
    write_columns(folder / "sessions" / "part-0.parquet", sessions_of(shop))
    write_columns(folder / "items.parquet", items_of(shop))
    (folder / "shop.json").write_text(json.dumps(asdict(shop.settings), indent=1) + "\n", encoding="utf-8")


def impressions_of(shop: Shop, clicks: Clicks, day: int) -> Columns:
    """Returns the columns of a day, one row an impression, in time order."""
    pages = slice(shop.first_page(day), shop.first_page(day + 1))
    user = shop.pages.user[pages]
    second = shop.pages.second[pages]
    item = shop.shown.item[pages].ravel()
    past = histories(clicks, np.repeat(user, PAGE), np.repeat(second, PAGE), HISTORY)
    clicked = clicks.item[past.values]
    items = shop.items
    columns: dict[str, NDArray[np.generic] | Lists] = {
        "time": np.repeat(second + START_S, PAGE),
        "user": np.repeat(shop.users.id[user], PAGE),
        "item": items.id[item],
        "category": items.category[item],
        "brand": items.brand[item],
        "age": np.repeat(shop.users.age[user], PAGE),
        "hour": np.repeat(second % DAY_S // 3600, PAGE),
        "position": np.tile(np.arange(PAGE), len(user)),
        "price": items.price[item],
        "history": Lists(items.id[clicked], past.offsets),
        "history_category": Lists(items.category[clicked], past.offsets),
    }
    for name in ("click", "purchase", "p_click", "p_purchase"):
        columns[name] = getattr(shop.shown, name)[pages].ravel()
    return columns


def sequences_of(shop: Shop) -> dict[str, Columns]:
    """Returns the clicks of users with three and more, before the last day; and those up to the first of the last day.

    In the test, the last item of a row is the one to predict from the others, and the only one of the last day.
    """
    days = shop.settings.days
    before = shop.clicks(days - 1)
    train = clicks_of_users(before, SHORTEST_SEQUENCE)
    clicks = shop.clicks(days)
    last_day = clicks.second >= (days - 1) * DAY_S
    follows = np.concatenate([[False], last_day[1:] & last_day[:-1] & (clicks.user[1:] == clicks.user[:-1])])
    upto = Clicks(*(column[~follows] for column in clicks))
    found = clicks_of_users(upto, SHORTEST_SEQUENCE)
    ends_there = upto.second[found.values[found.offsets[1:] - 1]] >= (days - 1) * DAY_S
    test = found.rows(ends_there)
    return {"train": _sequences(shop, before, train), "test": _sequences(shop, upto, test)}


def _sequences(shop: Shop, clicks: Clicks, rows: Lists) -> Columns:
    user = clicks.user[rows.values[rows.offsets[:-1]]]
    return {"user": shop.users.id[user], "items": Lists(shop.items.id[clicks.item[rows.values]], rows.offsets)}


def sessions_of(shop: Shop) -> Columns:
    """Returns the items that were clicked in one session, in time order, before the last day."""
    clicks = shop.clicks(shop.settings.days - 1)
    rows = clicks_of_sessions(clicks, SHORTEST_SESSION)
    return {"items": Lists(shop.items.id[clicks.item[rows.values]], rows.offsets)}


def items_of(shop: Shop) -> Columns:
    """Returns one row an item; how often it was shown and clicked counts the days before the last."""
    items = shop.items
    pages = slice(shop.first_page(shop.settings.days - 1))
    count = len(items.id)
    shown = shop.shown.item[pages].ravel()
    clicked = shown[shop.shown.click[pages].ravel() > 0]
    return {
        "item": items.id,
        "category": items.category,
        "brand": items.brand,
        "price": items.price,
        "first_day": items.first_day,
        "last_day": items.last_day,
        "shown": np.bincount(shown, minlength=count),
        "clicked": np.bincount(clicked, minlength=count),
    }
