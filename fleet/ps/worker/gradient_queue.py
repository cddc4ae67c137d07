"""The gradients of a table that wait to be sent, and how several become one.

Merging is by sum: with SGD k merged gradients equal k separate updates; rules with state see one larger gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fleet.ps.client.client import Client
from fleet.ps.client.merge import merge_gradients
from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.table.ids import UniqueKeys
from fleet.ps.table.ids import merge_gradients as sum_rows

__all__ = ["GradientQueue", "LateGradient", "StepCount", "Waiting", "by_step", "sum_waiting"]


class LateGradient(Protocol):
    """A dense gradient that is read when it is put, so that it can be added without a copy of its own."""

    def gradients(self) -> Rows | None:
        """Returns it as a fresh flat array; ``None`` when there is none."""

    def add_gradients(self, total: Rows) -> None:
        """Adds it to a flat array."""


@dataclass(slots=True)
class Waiting:
    """One gradient, or several that are added up already."""

    step: int  # the last one, when several are added up
    value: Any  # Gradient or dense rows
    count: int = 1
    first: int = 0  # the first one

    def __post_init__(self) -> None:
        self.first = self.first or self.step


class GradientQueue(deque[Waiting]):
    """The gradients of one table that wait."""

    @property
    def waiting(self) -> int:
        """How many gradients wait, those that are added up included."""
        return sum(item.count for item in self)


@dataclass
class StepCount:
    """Which steps of this worker the servers know to be applied whole, where they bound how far workers are apart.

    Args:
        put: the last step whose gradients were all put.
        told: the last step that the servers were told of.
    """

    put: int
    told: int
    wanted: int = 0  # a pull waits for the servers to know this one
    sending: dict[int, int] = field(default_factory=dict)  # the first step each thread has taken and not sent yet

    def done(self, queues: Iterable[GradientQueue]) -> int:
        """Returns the last step of which nothing waits or is on its way."""
        firsts = [queue[0].first for queue in queues if queue]
        return min([self.put + 1, *firsts, *self.sending.values()]) - 1


def sum_waiting(client: Client, table_id: int, items: Sequence[Waiting]) -> Gradient | Rows:
    """Returns the sum of ``items``."""
    table = client.tables[table_id]
    if table.dense:
        total = np.array(items[0].value, np.float32) if len(items) > 1 else np.asarray(items[0].value, np.float32)
        for item in items[1:]:
            total += item.value
        return total
    gradients: list[Gradient] = [item.value for item in items]
    if len(gradients) == 1:
        return gradients[0]
    if table.keeps_shows or any(
        part is not None for item in gradients for part in (item.shows, item.clicks, item.slots)
    ):
        return merge_gradients(gradients, table.keeps_shows)
    ids, inverse = UniqueKeys()(np.concatenate([item.ids for item in gradients]))
    return Gradient(ids, sum_rows(np.concatenate([item.rows for item in gradients]), inverse, len(ids)))


def by_step(taken: Mapping[int, list[Waiting]]) -> dict[int, dict[int, list[Waiting]]]:
    """Returns what was taken, by the last step of each table's items, in the order of the steps."""
    groups: dict[int, dict[int, list[Waiting]]] = {}
    for table, items in taken.items():
        groups.setdefault(items[-1].step, {})[table] = items
    return dict(sorted(groups.items()))
