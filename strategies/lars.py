"""lars: layer-wise adaptive rate scaling, for SGD with momentum on very large batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleet.strategies._base import NOT_YET, Stage, Strategy
from fleet.strategies._config import Config, setting
from fleet.strategies._optimizer_kinds import check_momentum, check_settings_off


@dataclass(frozen=True, kw_only=True)
class LarsConfig(Config, option="lars_configs"):
    """Numbers of the LARS rule."""

    lars_coeff: float = setting(0.001, "trust coefficient: share of the weight's norm that an update may have", above=0)
    lars_weight_decay: float = setting(0.0005, "weight decay inside the rule", at_least=0)
    epsilon: float = setting(0.0, "added to the denominator of the local rate", at_least=0)
    exclude_from_weight_decay: tuple[str, ...] = setting(
        [], "parameters whose qualified name contains one of these get no decay and the plain learning rate"
    )


class Lars(Strategy):
    """Replaces the rule of SGD with momentum by LARS."""

    name = "lars"
    meaning = "Update with LARS: each parameter's rate follows the ratio of its norm to its gradient's norm."
    stage = Stage.UPDATE
    Config = LarsConfig
    conflicts = {"lamb": "both replace the update rule"}
    refused = NOT_YET
    optimizer_effect = "updates with LARS momentum in place of SGD's rule"

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is SGD with momentum and nothing that LARS lacks."""
        check_momentum(self.name, optimizer)
        check_settings_off(self.name, optimizer, "nesterov", "dampening", "maximize")
