"""Progress: how far a run is, and how long the rest of it takes at the rate so far."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Progress"]


class Progress:
    """The steps of a run, counted from the first values that it logs, and how many there will be.

    A rank and a thread that reports may share it: one of them notes steps, and both read.

    Args:
        steps: returns the number of finished steps; where it is 0, the step of the values counts.

    Attributes:
        total_steps: the steps of the whole run; 0 where they are not known.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self.total_steps = 0
        self._steps = steps
        self._logged_step = 0
        self._first: tuple[float, int] | None = None  # when the first values came, and at which step

    @property
    def step(self) -> int:
        """The newest step."""
        return self._steps() or self._logged_step

    def note(self, step: int) -> None:
        """Notes that values were logged at ``step``."""
        self._logged_step = max(step, self._logged_step)
        if self._first is None:
            self._first = (time.monotonic(), self._steps() or step)

    def left_s(self, step: int) -> float | None:
        """Returns the seconds that the steps after ``step`` take at the rate so far; None before there is a rate."""
        if self._first is None or not self.total_steps:
            return None
        began_at, first = self._first
        if step <= first:
            return None
        return max(0, self.total_steps - step) * (time.monotonic() - began_at) / (step - first)
