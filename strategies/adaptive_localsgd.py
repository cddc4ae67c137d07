"""adaptive_localsgd: localsgd whose number of local steps follows the loss and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Guide
from fleet.strategies._shared.backward_calls import watch_losses
from fleet.strategies._shared.local_training import LocalOptimizer, TrainsLocally, mean_over_workers


@dataclass(frozen=True, kw_only=True)
class AdaptiveLocalsgdConfig(Config, option="adaptive_localsgd_configs"):
    """When the parameters are averaged at first."""

    init_k_steps: int = setting(1, "steps between two averages at the start", at_least=1, at_most=16)
    begin_step: int = setting(1, "last step of the start, in which every step averages", at_least=0)


class AdaptiveLocalsgd(TrainsLocally):
    """Averages parameters at intervals of 1 to 16 steps, longer while the loss is high for its learning rate."""

    name = "adaptive_localsgd"
    meaning = "localsgd that chooses the number of local steps, 1 to 16, from the loss and the learning rate."
    Config = AdaptiveLocalsgdConfig
    optimizer_effect = "averages the parameters of all workers at intervals that it computes; momentum stays local"
    guide = Guide(
        when="As localsgd, when no k is known: it follows the loss and the learning rate.",
        cost="As localsgd, and one more number per average.",
        formula="k = clip(ceil(sqrt(lr_0 * loss / (lr * loss_0) * init_k)), 1, 16)",
        source="Wang and Joshi, 2019, arXiv 1810.08313",
        example={"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2}},
    )

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns an optimizer that averages the parameters at intervals it computes."""
        config: AdaptiveLocalsgdConfig = self.config
        wrapped = AdaptiveLocalOptimizer(optimizer, self.name, self.job, config.begin_step, config.init_k_steps)
        self._stop_watching = watch_losses(wrapped.note_loss)
        return wrapped

    def close(self) -> None:
        """Stops watching the losses."""
        stop: Callable[[], None] | None = self.__dict__.get("_stop_watching")
        if stop is not None:
            stop()


class AdaptiveLocalOptimizer(LocalOptimizer):
    """Averages at intervals of k steps, recomputed at each average (Wang and Joshi, 2019, arXiv 1810.08313, eq. 18)::

        k = clip(ceil(sqrt(lr_0 * loss / (lr * loss_0) * init_k)), 1, 16)

    ``loss`` is the mean over the workers of the last value on which backward was called; ``lr_0`` and ``loss_0`` are
    the values at the first average.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._init_k_steps = self.k_steps
        self._loss: Tensor | None = None
        self._first: tuple[float, float] | None = None

    def note_loss(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Keeps the loss of this step; it is read only when parameters are averaged."""
        # Not read yet: float() would wait for the device in every step.
        self._loss = loss.detach()

    def average(self) -> None:
        """Averages the parameters and chooses the next interval; raises ConfigError when no loss was seen."""
        if self._loss is None:
            raise ConfigError(
                "adaptive_localsgd follows the loss, and backward was not called on a scalar since the start. "
                "Call loss.backward() on the mean loss, or use localsgd."
            )
        super().average()
        loss = mean_over_workers(float(self._loss), self._job)
        rate = float(self.param_groups[0]["lr"])
        if self._first is None:
            self._first = (loss, rate)
        self.k_steps = interval(loss, rate, *self._first, self._init_k_steps)

    def progress(self) -> dict[str, Any]:
        """Returns the entries for :meth:`resume`."""
        return {**super().progress(), "k_steps": self.k_steps, "first": list(self._first or ())}

    def resume(self, progress: dict[str, Any]) -> None:
        """Continues from ``progress``."""
        super().resume(progress)
        self.k_steps = int(progress.get("k_steps", self._init_k_steps))
        first = progress.get("first", ())
        self._first = (float(first[0]), float(first[1])) if first else None


def interval(loss: float, rate: float, first_loss: float, first_rate: float, init_k_steps: int) -> int:
    """Returns the number of local steps until the next average, 1 to 16.

    Example:
        >>> interval(loss=0.5, rate=0.1, first_loss=2.0, first_rate=0.1, init_k_steps=16)
        2
    """
    if rate <= 0 or first_loss <= 0 or not math.isfinite(loss):
        return 1
    return max(1, min(16, math.ceil(math.sqrt(max(first_rate * loss / (rate * first_loss) * init_k_steps, 0.0)))))
