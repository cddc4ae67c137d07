"""TurnOptimizer: ``step()`` ends a turn, and updates at the last one of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._gradients.accumulator import AccumulatingOptimizer
from fleet.strategies.reproducible.logical_gradients import LogicalGradients
from fleet.strategies.reproducible.turn_buffers import TurnBuffers


class TurnOptimizer(AccumulatingOptimizer):
    """Counts turns; where a round ends, the buffers are logical worker 0's on every process."""

    def __init__(self, optimizer: Optimizer, gradients: LogicalGradients, buffers: TurnBuffers) -> None:
        super().__init__(optimizer, gradients)
        self._gradients = gradients
        self._buffers = buffers
        self._rates_before: list[float] = []
        gradients.rates_of = self._rates

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a turn; updates at the last one of an update. Returns the closure's loss.

        Raises ConfigError where the loop has changed the learning rate since the batch before.
        """
        self._check_rates()
        loss = super().step(closure)
        self._buffers.note_step()
        return loss

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups if "lr" in group]

    def _check_rates(self) -> None:
        gradients = self._gradients
        rates = self._rates()
        if gradients.steps and rates != self._rates_before and not gradients.is_scheduled:
            raise ConfigError(
                f"The learning rate is {rates} in batch {gradients.steps + 1} of an update, and was "
                f"{self._rates_before} in the one before. With 'reproducible' a loop sees as many batches of an update "
                "as its process hosts logical workers, so a rate that follows a count of batches depends on the number "
                "of processes. Count updates: change it where fleet.update_loss(loss) has returned a number, or by a "
                "scheduler of torch."
            )
        self._rates_before = rates

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gradients": None, "_buffers": None}
