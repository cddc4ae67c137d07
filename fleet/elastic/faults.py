"""Fault injection: a test sets at which named point, on which rank and at which step a process dies.

``FLEET_FAULTS`` holds one or more faults, separated by ``;``. A fault is ``POINT:ACTION`` and any of ``rank=R``,
``step=N``, ``count=N`` (the N-th time the point is passed, from 1) and ``generation=N``, separated by ``:``. Actions:
``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``hang`` (waits forever in Python), ``raise`` (an OSError, as from a full
disk). Without the variable, a point costs one dictionary lookup.

Example:
    >>> Faults.read("save.block:kill:step=3:count=7").points["save.block"][0].count
    7
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet.env import Environment
from fleet.errors import ConfigError

POINTS = ("step", "save.begin", "save.block", "save.part", "save.manifest", "save.rename", "save.renamed", "save.prune")


def _hang() -> None:
    threading.Event().wait()


def _raise() -> None:
    raise OSError(28, "No space left on device (a fault of FLEET_FAULTS)")


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "raise": _raise,
}


@dataclass
class Fault:
    """One fault; ``None`` means any. ``passed`` counts how often its point was passed on its rank at its step."""

    action: str
    rank: int | None = None
    step: int | None = None
    count: int | None = None
    generation: int | None = None
    passed: int = 0

    def meets(self, rank: int, step: int, generation: int) -> bool:
        """Counts this pass, and returns whether the fault is due."""
        pairs = ((self.rank, rank), (self.step, step), (self.generation, generation))
        if any(wanted not in (None, actual) for wanted, actual in pairs):
            return False
        self.passed += 1
        return self.count in (None, self.passed)


@dataclass
class Faults:
    """The faults of this process by point.

    Attributes:
        text: the value of ``FLEET_FAULTS`` that they were read from.
        trainer: the process beside which this one writes, and which a fault that kills ends as well; 0 in the trainer.
    """

    points: dict[str, list[Fault]] = field(default_factory=dict)
    rank: int = 0
    generation: int = 0
    text: str = ""
    trainer: int = 0

    @classmethod
    def read(cls, text: str | None, rank: int = 0, generation: int = 0, trainer: int = 0) -> Faults:
        """Returns the faults that ``text``, the value of ``FLEET_FAULTS``, describes; raises ConfigError."""
        points: dict[str, list[Fault]] = {}
        for entry in (text or "").split(";"):
            if entry.strip():
                point, fault = _parse(entry.strip())
                points.setdefault(point, []).append(fault)
        return cls(points, rank, generation, text or "", trainer)

    def meet(self, point: str, step: int) -> None:
        """Triggers the faults that are due at ``point``."""
        for fault in self.points.get(point, ()):
            if fault.meets(self.rank, step, self.generation):
                if fault.action == "kill" and os.getppid() == self.trainer:
                    os.kill(self.trainer, signal.SIGKILL)
                ACTIONS[fault.action]()


def injected_faults(rank: int) -> Faults:
    """Returns the faults that the environment sets for this worker; raises ConfigError."""
    environment = Environment()
    return Faults.read(environment.raw("FLEET_FAULTS"), rank, environment.int("FLEET_GENERATION"))


def _parse(entry: str) -> tuple[str, Fault]:
    point, *rest = entry.split(":")
    if point not in POINTS or not rest or rest[0] not in ACTIONS:
        raise ConfigError(
            f"FLEET_FAULTS has {entry!r}; it takes POINT:ACTION with a point of {', '.join(POINTS)} and an action of "
            f"{', '.join(ACTIONS)}."
        )
    numbers: dict[str, int] = {}
    for condition in rest[1:]:
        name, _, value = condition.partition("=")
        if name not in ("rank", "step", "count", "generation") or not value.isdigit():
            raise ConfigError(f"FLEET_FAULTS has {condition!r}; it takes rank=, step=, count= or generation= a number.")
        numbers[name] = int(value)
    return point, Fault(rest[0], **numbers)
