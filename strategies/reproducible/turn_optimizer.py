"""TurnOptimizer: ``step()`` ends a turn, and updates at the last one of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
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
        self._settings_before: dict[str, Any] = {}
        gradients.settings_of = self._settings

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Ends a turn; updates at the last one of an update. Returns the closure's loss.

        Raises ConfigError where the loop has changed the learning rate, or another setting, since the batch before.
        """
        self._check_settings()
        loss = super().step(closure)
        self._buffers.note_step()
        return loss

    def _settings(self) -> dict[str, Any]:
        """Returns the numbers in the parameter groups: learning rates, momenta, decays."""
        return {
            f"param_groups[{place}][{key!r}]": float(value) if isinstance(value, Tensor) else value
            for place, group in enumerate(self.param_groups)
            for key, value in group.items()
            if isinstance(value, Tensor | float | int | tuple)
        }

    def _check_settings(self) -> None:
        gradients = self._gradients
        now = self._settings()
        before = self._settings_before
        changed = [name for name, value in now.items() if name in before and value != before[name]]
        if gradients.steps and changed and not gradients.is_scheduled:
            name = changed[0]
            raise ConfigError(
                f"{name} is {now[name]} in batch {gradients.steps + 1} of an update, and was {before[name]} in the one "
                "before. With 'reproducible' a loop sees as many batches of an update as its process hosts logical "
                "workers, so a setting that follows a count of batches depends on the number of processes. Count "
                "updates: change it where fleet.update_loss(loss) has returned a number, or by a scheduler of torch."
            )
        self._settings_before = now

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gradients": None, "_buffers": None}
