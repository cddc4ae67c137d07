"""localsgd: every worker trains by itself, and the parameters are averaged every k steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Guide
from fleet.strategies._shared.local_training import LocalOptimizer, TrainsLocally


@dataclass(frozen=True, kw_only=True)
class LocalsgdConfig(Config, option="localsgd_configs"):
    """When the parameters are averaged."""

    k_steps: int = setting(1, "steps between two averages", at_least=1)
    begin_step: int = setting(1, "last step of the start, in which every step averages", at_least=0)


class Localsgd(TrainsLocally):
    """Averages parameters every k steps; gradients are not exchanged."""

    name = "localsgd"
    meaning = "Train each worker by itself and average the parameters every k steps."
    Config = LocalsgdConfig
    conflicts = {
        "adaptive_localsgd": "both decide at which step the parameters are averaged",
        **TrainsLocally.conflicts,
    }
    optimizer_effect = "averages the parameters of all workers every k_steps steps; momentum stays local"
    guide = Guide(
        when="The network is too slow for an exchange at every step, and the workers see similar data.",
        cost="One average of the parameters per k steps. Workers differ in between, so save at an average.",
        formula="p = (p_1 + ... + p_N) / N at every step up to begin_step, then every k_steps",
        source="Stich, 2019, arXiv 1805.09767",
        example={"localsgd": True, "localsgd_configs": {"k_steps": 2}},
    )

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns an optimizer that averages the parameters every ``k_steps`` steps."""
        return LocalOptimizer(optimizer, self.name, self.job, self.config.begin_step, self.config.k_steps)
