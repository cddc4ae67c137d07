"""Visits: who comes when, what each page shows, and what is clicked and bought.

A page takes candidates on sale that day, half by popularity and half by popularity within topics of the visitor's mood,
and ranks them by their true logits and noise: a policy that knows something and explores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.items import Items
from simulator.settings import DAY_S, PAGE, TOPICS, Settings
from simulator.truth import EXAMINATION, liking_logits, purchase_logits, sigmoid
from simulator.users import Users

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

PAGES_PER_SESSION = 2.5  # mean
MOST_PAGES = 8
SECONDS_PER_PAGE = 40
CANDIDATES = 24
POLICY = 0.5  # weight of the true logits beside the noise
MOOD = 0.5  # share of a session's mood that is one topic
WITH_MOOD = 0.6  # share of sessions that have one


class Pages(NamedTuple):
    """Pages in time order.

    Args:
        session: int64 [pages], the number of the session.
        user: int64 [pages], places in the users.
        second: int64 [pages], since day 0.
        mood: float32 [pages, topics], the taste of the session.
    """

    session: Integers
    user: Integers
    second: Integers
    mood: Floats

    def part(self, rows: slice) -> Pages:
        """Returns some of the pages."""
        return Pages(self.session[rows], self.user[rows], self.second[rows], self.mood[rows])


class Shown(NamedTuple):
    """What the pages showed, [pages, positions] each; probabilities and outcomes are float32, places int64."""

    item: Integers
    p_click: Floats
    p_purchase: Floats
    click: Floats
    purchase: Floats


def make_pages(settings: Settings, users: Users) -> Pages:
    """Returns the pages that the visitors open."""
    rng = np.random.default_rng([settings.seed, 3])
    count = -(-settings.impressions // PAGE)
    # Each session has at least one page, so as many sessions as pages are enough.
    lengths = np.minimum(rng.geometric(1 / PAGES_PER_SESSION, count), MOST_PAGES)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), count)) + 1]
    sessions = len(lengths)
    user = rng.choice(settings.users, sessions, p=users.activity)
    day = rng.integers(0, settings.days, sessions)
    hour = np.clip(rng.normal(19 - users.age[user], 4.5), 0, 23.9)
    start = day * DAY_S + np.minimum((hour * 3600).astype(np.int64), DAY_S - MOST_PAGES * SECONDS_PER_PAGE)
    mood = _moods(users.tastes[day, user], rng)
    session = np.repeat(np.arange(sessions), lengths)[:count]
    page = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)[:count]
    second = start[session] + page * SECONDS_PER_PAGE
    order = np.argsort(second, kind="stable")
    session = session[order]
    return Pages(session, user[session], second[order], mood[session])


def _moods(taste: Floats, rng: np.random.Generator) -> Floats:
    """Returns the tastes of sessions: that of the day, and often more of one topic, drawn from it."""
    draw = rng.random((len(taste), 1), np.float32)
    topic = np.minimum((taste.cumsum(axis=1) < draw).sum(axis=1), TOPICS - 1)
    share = MOOD * (rng.random(len(taste)) < WITH_MOOD).astype(np.float32)
    mood = taste * (1 - share[:, None])
    mood[np.arange(len(taste)), topic] += share
    return mood


def show_day(settings: Settings, users: Users, items: Items, pages: Pages, day: int) -> Shown:
    """Returns what the pages of one day showed, and what came of it.

    Args:
        settings, users, items: of the shop.
        pages: those of the day.
        day: its number.
    """
    rng = np.random.default_rng([settings.seed, 4, day])
    time = (pages.second / DAY_S).astype(np.float32)
    found = _candidates(items, pages, day, rng)
    logits = liking_logits(users, items, pages.user, found, pages.mood, time)
    score = POLICY * logits + rng.gumbel(size=logits.shape).astype(np.float32)
    score[_repeated(found)] = -np.inf
    best = np.argsort(-score, axis=1)[:, :PAGE]
    item = np.take_along_axis(found, best, axis=1)
    p_click = EXAMINATION * sigmoid(np.take_along_axis(logits, best, axis=1))
    p_purchase = sigmoid(purchase_logits(users, items, pages.user, item, pages.mood))
    click = (rng.random(p_click.shape) < p_click).astype(np.float32)
    purchase = click * (rng.random(p_purchase.shape) < p_purchase)
    return Shown(item, p_click, p_purchase, click, purchase.astype(np.float32))


def _candidates(items: Items, pages: Pages, day: int, rng: np.random.Generator) -> Integers:
    """Returns places of items on sale, int64 [pages, candidates]."""
    count = len(pages.user)
    ends = np.cumsum(items.weight * items.alive(day))
    bounds = np.concatenate([[0.0], ends])[np.searchsorted(items.topic, np.arange(TOPICS + 1))]
    low = np.zeros((count, CANDIDATES))
    high = np.full((count, CANDIDATES), ends[-1])
    share = rng.random((count, CANDIDATES // 2), np.float32)
    cumulated = pages.mood.cumsum(axis=1)
    topic = np.minimum((cumulated[:, None, :] < share[:, :, None]).sum(axis=2), TOPICS - 1)
    low[:, ::2] = bounds[topic]
    high[:, ::2] = bounds[topic + 1]
    draw = low + rng.random(low.shape) * (high - low)
    return np.minimum(np.searchsorted(ends, draw, side="right"), np.searchsorted(ends, ends[-1]))


def _repeated(found: Integers) -> NDArray[np.bool_]:
    """Returns which candidates of a page are there before, bool like ``found``."""
    order = np.argsort(found, axis=1, kind="stable")
    ordered = np.take_along_axis(found, order, axis=1)
    again = np.zeros(found.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again
