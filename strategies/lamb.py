"""lamb: layer-wise adaptive moments, for Adam on very large batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleet.strategies._base import NOT_YET, Stage, Strategy
from fleet.strategies._config import Config, setting
from fleet.strategies._optimizer_kinds import check_adam, check_settings_off


@dataclass(frozen=True, kw_only=True)
class LambConfig(Config, option="lamb_configs"):
    """Numbers of the LAMB rule."""

    lamb_weight_decay: float = setting(0.01, "weight decay inside the rule; it takes the place of Adam's", at_least=0)
    exclude_from_weight_decay: tuple[str, ...] = setting(
        [], "parameters whose qualified name ends with one of these get no decay"
    )


class Lamb(Strategy):
    """Replaces the rule of Adam by LAMB."""

    name = "lamb"
    meaning = "Update with LAMB: Adam's step, scaled for each parameter by the ratio of its norm to the step's norm."
    stage = Stage.UPDATE
    Config = LambConfig
    refused = NOT_YET
    optimizer_effect = "updates with LAMB in place of Adam's rule"

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is Adam with nothing that LAMB lacks."""
        check_adam(self.name, optimizer)
        check_settings_off(self.name, optimizer, "amsgrad", "maximize")
