"""What each user had clicked before each page, and the clicks of users and of sessions in time order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.columns import Lists

Integers = NDArray[np.int64]


class Clicks(NamedTuple):
    """All clicks, by user and then by time.

    Args:
        user, session, second, item: int64 [clicks]; user and item are places.
    """

    user: Integers
    session: Integers
    second: Integers
    item: Integers


def sorted_clicks(user: Integers, session: Integers, second: Integers, item: Integers) -> Clicks:
    """Returns clicks that are in time order by user and then by time."""
    order = np.argsort(user, kind="stable")
    return Clicks(user[order], session[order], second[order], item[order])


def histories(clicks: Clicks, user: Integers, second: Integers, most: int) -> Lists:
    """Returns, for each row, which of the ``clicks`` are its user's last ones before its second, oldest first.

    Args:
        clicks: of all users.
        user, second: int64 [rows].
        most: clicks in a history.
    """
    end = np.searchsorted(_moments(clicks.user, clicks.second), _moments(user, second), side="left")
    start = np.maximum(np.searchsorted(clicks.user, user, side="left"), end - most)
    return _ranges(start, end)


def clicks_of_users(clicks: Clicks, least: int) -> Lists:
    """Returns which clicks each user made, for users with at least ``least``."""
    return _runs(clicks.user, least)


def clicks_of_sessions(clicks: Clicks, least: int) -> Lists:
    """Returns which clicks each session had, for sessions with at least ``least``."""
    order = np.argsort(clicks.session, kind="stable")
    found = _runs(clicks.session[order], least)
    return Lists(order[found.values], found.offsets)


def _moments(user: Integers, second: Integers) -> Integers:
    # Seconds since 1970 take 31 bits, which leaves 2**26 users.
    return (user << 36) + second


def _runs(keys: Integers, least: int) -> Lists:
    """Returns the places of each run of equal keys that is long enough."""
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1, [len(keys)]])
    start, end = bounds[:-1], bounds[1:]
    kept = end - start >= least
    return _ranges(start[kept], end[kept])


def _ranges(start: Integers, end: Integers) -> Lists:
    """Returns the integers from each start to before each end."""
    lengths = end - start
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], lengths)
    return Lists(values, offsets)
