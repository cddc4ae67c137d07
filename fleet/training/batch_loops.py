"""BatchLoops: what happens where a training loop asks for its next batch: due checkpoints, and a stop on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fleet.elastic._checkpoint import Checkpoint
    from fleet.elastic._health import Health

Batch = TypeVar("Batch")


class BatchLoops:
    """The loops of one session.

    A loop over something of Fleet's says when it asks for its next batch (:meth:`over`). Any other loop begins a batch
    with the model's next forward. Where the position of other data is saved, that data may have given its next batch
    already: in such a loop, and where ``zip`` asks one after the other. ``holds_untrained`` says so.

    Args:
        health: returns the health of this worker, None where nobody asks it to stop.
    """

    def __init__(self, health: Callable[[], Health | None]) -> None:
        self._health = health
        self._running = 0  # loops that say when they ask for their next batch
        self.checkpoints: list[Checkpoint] = []
        self.holds_untrained = False

    def after_batch(self, data: object = None) -> None:
        """Writes the checkpoints that are due, and exits when asked to stop; called where a loop begins a batch.

        ``data`` is what the loop goes over, where that is known.
        """
        self.holds_untrained = True
        try:
            for checkpoint in self.checkpoints:
                checkpoint.save_when_due(data)
            health = self._health()
            if health is not None:
                health.leave_when_preempted()
        finally:
            self.holds_untrained = False

    def over(self, data: object, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields ``batches`` of ``data``; before each of them, and after the last, comes :meth:`after_batch`.

        Before the first one too: a loop may end with a batch and never ask for another, as ``next(iter(data))`` does.
        """
        self._running += 1
        try:
            self.after_batch(data)
            for batch in batches:
                yield batch
                self.after_batch(data)
        finally:
            self._running -= 1

    def before_forward(self) -> None:
        """Called before a forward that trains."""
        if self.checkpoints and not self._running:
            self.after_batch()
