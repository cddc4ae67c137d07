"""adaptive_localsgd: localsgd whose number of local steps follows the loss and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleet.strategies._base import NOT_YET, Stage, Strategy, Values
from fleet.strategies._config import Config, setting
from fleet.strategies._local_training import local_training_notes
from fleet.strategies._optimizer_kinds import check_sgd


@dataclass(frozen=True, kw_only=True)
class AdaptiveLocalsgdConfig(Config, option="adaptive_localsgd_configs"):
    """When the parameters are averaged at first."""

    init_k_steps: int = setting(1, "steps between two averages at the start", at_least=1, at_most=16)
    begin_step: int = setting(1, "last step of the start, in which every step averages", at_least=0)


class AdaptiveLocalsgd(Strategy):
    """Averages parameters at intervals of 1 to 16 steps, longer while the loss is high for its learning rate."""

    name = "adaptive_localsgd"
    meaning = "localsgd that chooses the number of local steps, 1 to 16, from the loss and the learning rate."
    stage = Stage.STEP
    Config = AdaptiveLocalsgdConfig
    after = ("amp",)
    replaces = ("data_parallel",)
    conflicts = {
        "gradient_merge": "both decide which of the user's steps count, and no definition says which one counts first",
        "lars": "workers that train by themselves need torch.optim.SGD, and lars puts its own rule in its place",
        "lamb": "workers that train by themselves need torch.optim.SGD, and lamb works on Adam",
    }
    refused = NOT_YET
    model_effect = "starts from rank 0's parameters and exchanges no gradients"
    optimizer_effect = "averages the parameters of all workers at intervals that it computes; momentum stays local"

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns remarks on settings that have nothing to act on while gradients stay local."""
        return local_training_notes(cls.name, options, world_size)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is SGD."""
        check_sgd(self.name, optimizer)
