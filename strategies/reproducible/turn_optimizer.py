"""TurnOptimizer: ``step()`` ends a turn, and updates at the last one of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fleet.strategies._gradients.accumulator import AccumulatingOptimizer
from fleet.strategies.reproducible.logical_gradients import LogicalGradients
from fleet.strategies.reproducible.turn_buffers import TurnBuffers


class TurnOptimizer(AccumulatingOptimizer):
    """Counts turns; where a round ends, the buffers are logical worker 0's on every process."""

    def __init__(self, optimizer: Optimizer, gradients: LogicalGradients, buffers: TurnBuffers) -> None:
        super().__init__(optimizer, gradients)
        self._buffers = buffers

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a turn; updates at the last one of an update. Returns the closure's loss."""
        loss = super().step(closure)
        self._buffers.note_step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_buffers": None}
