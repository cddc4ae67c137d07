"""Waiting for an exchange in C++."""

from __future__ import annotations

import re
from pathlib import Path

from fleet.job.whereabouts import is_waiting
from fleet.strategies._shared import waiting

STRATEGIES = Path(waiting.__file__).parents[1]


class Work:
    def wait(self) -> None:
        import sys

        outward = sys._getframe(1)  # C++ has no frame of its own
        assert is_waiting(outward)


def test_a_worker_in_an_exchange_counts_as_waiting() -> None:
    """Issue 36: stage 1 waits in its own frame, and the others took it for busy, for ever."""
    waiting.wait_for(Work())


def test_strategies_wait_nowhere_else() -> None:
    own = [path for path in STRATEGIES.rglob("*.py") if path.name != "waiting.py"]
    assert not [path for path in own if re.search(r"\.wait\(\)", path.read_text())]
