"""The people who visit the shop: age, how often they come, and tastes that drift from day to day."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from formats.ids import ids_of
from numpy.typing import NDArray

from simulator.settings import AGES, TOPICS, Settings

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

SHARPNESS = 2.5  # of tastes: how far the loved topics stand out
KEPT = 0.95  # of yesterday's taste
BY_AGE = 0.4  # share of the variance of tastes that people of an age have in common


class Users(NamedTuple):
    """The visitors.

    Args:
        id: int64 [users].
        age: int64 [users], bucket 0 to 5.
        activity: float64 [users], the share of sessions.
        thrift: float32 [users], how much a price deters.
        tastes: float32 [days, users, topics], shares of topics.
    """

    id: Integers
    age: Integers
    activity: NDArray[np.float64]
    thrift: Floats
    tastes: Floats


def make_users(settings: Settings) -> Users:
    """Returns the visitors of a shop."""
    count = settings.users
    rng = np.random.default_rng([settings.seed, 2])
    age = rng.choice(AGES, count, p=[0.08, 0.22, 0.25, 0.2, 0.15, 0.1])
    activity = rng.lognormal(0, 1, count)
    thrift_of_age = np.linspace(1.0, 0.0, AGES)
    thrift = 0.7 * thrift_of_age[age] + rng.uniform(0, 0.3, count)
    common = rng.standard_normal((AGES, TOPICS), np.float32)
    own = rng.standard_normal((count, TOPICS), np.float32)
    tastes = np.empty((settings.days, count, TOPICS), np.float32)
    for day in range(settings.days):
        tastes[day] = _shares(np.sqrt(BY_AGE) * common[age] + np.sqrt(1 - BY_AGE) * own)
        own = KEPT * own + np.sqrt(1 - KEPT**2) * rng.standard_normal(own.shape, np.float32)
    return Users(ids_of("user", count), age, activity / activity.sum(), thrift.astype(np.float32), tastes)


def _shares(scores: Floats) -> Floats:
    """Returns the softmax of each row."""
    powers = np.exp(SHARPNESS * (scores - scores.max(axis=-1, keepdims=True)))
    shares: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return shares
