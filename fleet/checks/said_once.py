"""SaidOnce: a word of each worker about one thing, which the others read when they come by; nobody waits."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.job.job import Job
from fleet.job.whereabouts import user_line

_LOOKS = 20  # steps at which worker 0 looks for the others' words; in lockstep the first look finds all of them


class SaidOnce:
    """One word of each worker of ``job`` about ``topic``, said before a pass exchanges, so that all have at the step.

    Attributes:
        line: where this worker said it.
        is_over: whether all have said it, or too many steps went by.
    """

    def __init__(self, job: Job, topic: str) -> None:
        self.line = ""
        self.is_over = False
        self._job = job
        self._topic = topic
        self._left = _LOOKS

    def say(self, text: str) -> None:
        """Says ``text``, once."""
        if not self.line and self._job.roll_call is not None:
            self.line = user_line()
            self._job.roll_call.post(self._topic, text)

    def heard(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the words of all ``ranks``, at one step of worker 0; before and after it nothing."""
        roll_call = self._job.roll_call
        if self.is_over:
            return {}
        # All workers count their looks, so that they stop at one step; only worker 0 speaks.
        self._left -= 1
        found = roll_call.posted(self._topic, ranks) if self.line and roll_call is not None else {}
        self.is_over = bool(found) or not self._left
        return found if self._job.global_rank == 0 else {}
