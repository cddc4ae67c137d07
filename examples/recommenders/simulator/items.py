"""The articles of the shop: topics, categories, brands, prices, quality, popularity, and the days on sale."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from formats.ids import ids_of
from numpy.typing import NDArray

from simulator.settings import TOPICS, Settings

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

CATEGORIES = 5 * TOPICS
BRANDS = 300
MAIN_TOPIC = 0.8  # what an item has of its category's topic
ZIPF = 0.9
DAYS_ON_SALE = 12.0  # mean


class Items(NamedTuple):
    """The articles, ordered by topic.

    Args:
        id, category, brand: int64 [items], ids.
        price: float32 [items].
        first_day, last_day: int64 [items], both on sale; the first may be before day 0.
        topic: int64 [items], the topic of the category.
        topics: float32 [items, topics], shares of topics.
        quality: float32 [items], in logits.
        value: float32 [items], how much quality makes people buy, in logits.
        peak: float32 [items], the hour at which the category is clicked most.
        weight: float64 [items], popularity by Zipf's law.
    """

    id: Integers
    category: Integers
    brand: Integers
    price: Floats
    first_day: Integers
    last_day: Integers
    topic: Integers
    topics: Floats
    quality: Floats
    value: Floats
    peak: Floats
    weight: NDArray[np.float64]

    def log_price(self) -> Floats:
        """Returns the logarithm of the price around 0, float32 [items]."""
        return np.log(self.price / 20.0)

    def alive(self, day: int) -> NDArray[np.bool_]:
        """Returns which items are on sale, bool [items]."""
        return (self.first_day <= day) & (day <= self.last_day)


def make_items(settings: Settings) -> Items:
    """Returns the articles of a shop."""
    count = settings.items
    rng = np.random.default_rng([settings.seed, 1])
    category = rng.choice(CATEGORIES, count, p=_zipf(CATEGORIES, 0.5))
    order = np.argsort(category % TOPICS, kind="stable")
    category = category[order]
    topic = category % TOPICS
    brand = rng.choice(BRANDS, count, p=_zipf(BRANDS, 0.7))
    rest = rng.dirichlet(np.full(TOPICS, 0.3), count)
    topics = (1 - MAIN_TOPIC) * rest
    topics[np.arange(count), topic] += MAIN_TOPIC
    first, last = _days(settings, rng)
    category_price = rng.normal(0, 0.5, CATEGORIES)
    price = 20.0 * np.exp(category_price[category] + rng.normal(0, 0.6, count))
    brand_quality = rng.normal(0, 0.3, BRANDS)
    category_quality = rng.normal(0, 0.3, CATEGORIES)
    return Items(
        id=ids_of("item", count)[rng.permutation(count)],
        category=ids_of("category", CATEGORIES)[category],
        brand=ids_of("brand", BRANDS)[brand],
        price=np.round(price, 2).astype(np.float32),
        first_day=first,
        last_day=last,
        topic=topic,
        topics=topics.astype(np.float32),
        quality=(brand_quality[brand] + category_quality[category] + rng.normal(0, 0.5, count)).astype(np.float32),
        value=(brand_quality[brand] + rng.normal(0, 0.5, count)).astype(np.float32),
        peak=rng.uniform(0, 24, CATEGORIES)[category].astype(np.float32),
        weight=rng.permutation(_zipf(count, ZIPF)),
    )


def _zipf(count: int, power: float) -> NDArray[np.float64]:
    weights = np.arange(1, count + 1) ** -power
    return weights / weights.sum()


def _days(settings: Settings, rng: np.random.Generator) -> tuple[Integers, Integers]:
    """Returns the first and last days on sale: as many items appear on a day as vanish, on average."""
    count = settings.items
    first = rng.integers(1, settings.days, count)
    are_there = rng.random(count) < DAYS_ON_SALE / (DAYS_ON_SALE + settings.days - 1)
    first[are_there] = -rng.exponential(DAYS_ON_SALE, int(are_there.sum())).astype(np.int64)
    # The exponential law has no memory: items that are there on day 0 stay as long as new ones.
    return first, np.maximum(first, 0) + rng.exponential(DAYS_ON_SALE, count).astype(np.int64)
