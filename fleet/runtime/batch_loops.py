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
    with the model's next forward, and has then taken it from its data already: ``holds_untrained`` says so.

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
        for checkpoint in self.checkpoints:
            checkpoint.save_when_due(data)
        health = self._health()
        if health is not None:
            health.leave_when_preempted()

    def over(self, data: object, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields ``batches`` of ``data``; between two of them comes :meth:`after_batch`."""
        self._running += 1
        try:
            for batch in batches:
                yield batch
                self.after_batch(data)
        finally:
            self._running -= 1

    def before_forward(self) -> None:
        """Called before a forward that trains."""
        if not self.checkpoints or self._running:
            return
        self.holds_untrained = True
        try:
            self.after_batch()
        finally:
            self.holds_untrained = False
