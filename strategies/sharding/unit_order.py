"""The order in which workers gather and reduce the units of divided models: they agree before two can be mixed up.

[Note: The order of units]
FSDP2 gathers and reduces a unit when this worker comes to it, and no collective says which unit it is about. Workers
that take different branches would join parts of two parameters, or add up the gradients of two.

Each worker predicts the next exchange from the eight before it, or from as many of these as have come before: it is
the exchange that followed them last time. Workers that have exchanged the same so far predict the same, so no message
is needed for an exchange that is as predicted, as in every step of a loop that repeats itself. A worker that comes to
a different exchange (all do in their first step, and again when all take another branch) first meets the others in the
roll call, which goes on where all come to the same. A worker that does as predicted does not come to the meeting: the
others learn there that it waits elsewhere, and nothing has been mixed up.

An exchange of gradients is known by its unit and the parameters with a gradient. With ``find_unused_parameters`` these
differ between workers and none of this is needed: all units are gathered before the first runs, and reduced after the
last; see :class:`~fleet.strategies.sharding.divided_model.DividedModule`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from fleet.errors import ConfigError, RendezvousError

_KNOWN = 8  # exchanges by which the next one is predicted
_MOST = 1 << 14  # predictions that are kept
_ADVICE = (
    "In sharding stage 3 every worker must use the same parameters in a batch. Where they do not, set "
    "strategy.find_unused_parameters = True, with which each may take another branch of the model, or let every "
    "parameter take part on every worker."
)


class UnitOrder:
    """Predicts the exchanges of all divided models of a job; see [Note: The order of units].

    Args:
        meet: returns when all workers have made the call that it is given, and raises where one makes another.
    """

    def __init__(self, meet: Callable[[str], None]) -> None:
        self._meet = meet
        self._units = 0
        self._recent: deque[tuple[int, ...]] = deque(maxlen=_KNOWN)
        self._next: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}

    def add(self) -> int:
        """Returns the number of a further unit."""
        self._units += 1
        return self._units

    def check(self, exchange: tuple[int, ...], described: Callable[[], str], advice: str = _ADVICE) -> None:
        """Returns when it is certain that all workers come to ``exchange``; raises where one comes to another."""
        recent = tuple(self._recent)
        known = self._next
        if known.get(recent) != exchange:
            # The longest known end of the recent exchanges predicts. Every end learns, so that another history with the
            # same end is predicted as well.
            ends = [recent[place:] for place in range(len(recent) + 1)]
            if next((known[end] for end in ends[:-1] if end in known), None) != exchange:
                try:
                    self._meet(described())
                except (ConfigError, RendezvousError) as error:
                    raise type(error)(f"{error}\n{advice}") from error
            # Workers clear at the same exchange, for all have predicted and learned the same.
            if len(known) > _MOST:
                known.clear()
            known.update(dict.fromkeys(ends, exchange))
        self._recent.append(exchange)

    def __deepcopy__(self, memo: Any) -> UnitOrder:
        return self


class _Agreed:
    """Calls ``agree`` before the exchange of the class that it is mixed into."""

    def __init__(self, agree: Callable[[], None]) -> None:
        self._agree = agree

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Exchanges."""
        self._agree()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class AgreedGather(_Agreed, DefaultAllGather):
    """Gathers the parts of a unit."""


class AgreedReduce(_Agreed, DefaultReduceScatter):
    """Reduces the gradients of a unit to their parts."""
