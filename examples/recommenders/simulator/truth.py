"""The true probabilities of clicks and purchases, and the best that any model can reach.

A click needs a look at the position and a liking: p_click = examination(position) * liking.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.items import Items
from simulator.settings import PAGE
from simulator.users import Users

try:
    from sklearn.metrics import roc_auc_score
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: the examples need `pip install '.[examples]'`, run in the clone.") from None

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

BASE = -3.2
PURCHASE_BASE = -3.8
TASTE = 5.0  # logits between none and all of a topic
PRICE = 0.8
HOUR = 0.4
NEW = 0.8  # of an item on its first day
NEW_DAYS = 1.5
EXAMINATION = (np.arange(1, PAGE + 1) ** -0.5).astype(np.float32)


def liking_logits(users: Users, items: Items, user: Integers, item: Integers, mood: Floats, time: Floats) -> Floats:
    """Returns the logits of a click on items that were looked at.

    Args:
        users, items: of the shop.
        user: int64 [pages], places in ``users``.
        item: int64 [pages, width], places in ``items``.
        mood: float32 [pages, topics], the taste of the session.
        time: float32 [pages], days since day 0.
    """
    taste = np.matmul(items.topics[item], mood[:, :, None])[..., 0]
    hour = (time % 1) * 24
    daily = np.cos((hour[:, None] - items.peak[item]) * np.float32(2 * np.pi / 24))
    age = np.maximum(time[:, None] - items.first_day[item].astype(np.float32), 0)
    price = users.thrift[user][:, None] * items.log_price()[item]
    logits: Floats = BASE + TASTE * taste + items.quality[item] - PRICE * price + HOUR * daily
    logits += NEW * np.exp(-age / np.float32(NEW_DAYS))
    return logits


def purchase_logits(users: Users, items: Items, user: Integers, item: Integers, mood: Floats) -> Floats:
    """Returns the logits of a purchase after a click; arguments as those of :func:`liking_logits`."""
    taste = np.matmul(items.topics[item], mood[:, :, None])[..., 0]
    price = (0.5 + users.thrift[user][:, None]) * items.log_price()[item]
    logits: Floats = PURCHASE_BASE + 2.5 * taste + 2 * items.value[item] - price
    return logits


def sigmoid(logits: Floats) -> Floats:
    """Returns the probabilities of logits."""
    found: Floats = 1 / (1 + np.exp(-logits))
    return found


class Best(NamedTuple):
    """The AUC of the true probabilities on the outcomes that were drawn from them.

    Args:
        click: of clicks.
        click_without_position: of clicks, for models that do not see the position. They rank by the liking, because
            the policy shows what is liked more at better positions.
        purchase: of purchases among the clicks.
        click_and_purchase: of purchases among all impressions.
    """

    click: float
    click_without_position: float
    purchase: float
    click_and_purchase: float


def best_aucs(columns: Mapping[str, NDArray[np.generic]]) -> Best:
    """Returns the best that any model can reach on average, whatever it knows of users, items and tastes.

    Args:
        columns: of impressions: click, purchase, p_click, p_purchase, position; arrays [rows] of numpy.
    """
    click, purchase = columns["click"], columns["purchase"]
    p_click, p_purchase = columns["p_click"], columns["p_purchase"]
    clicked = np.asarray(click) > 0
    return Best(
        click=float(roc_auc_score(click, p_click)),
        click_without_position=float(roc_auc_score(click, p_click / EXAMINATION[columns["position"]])),
        purchase=float(roc_auc_score(purchase[clicked], p_purchase[clicked])),
        click_and_purchase=float(roc_auc_score(purchase, p_click * p_purchase)),
    )
