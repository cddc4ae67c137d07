"""lars: layer-wise adaptive rate scaling, for SGD with momentum on very large batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.optimizer_kinds import check_momentum, check_settings_off
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._shared.norm import norms
from fleet.strategies._shared.parts import local
from fleet.strategies._shared.update_rule import RuleWrapper


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
    optimizer_effect = "updates with LARS momentum in place of SGD's rule"
    guide = Guide(
        when="SGD with momentum at batch sizes of many thousands.",
        cost="Two norms per parameter and step.",
        formula="local = lr coeff |p| / (|g| + wd |p| + eps); v = m v + local (g + wd p); p = p - v",
        source="You, Gitman and Ginsburg, 2017, arXiv 1708.03888",
        example={"lars": True, "lars_configs": {"exclude_from_weight_decay": ["bias"]}},
    )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is SGD with momentum and nothing that LARS lacks."""
        check_momentum(self.name, optimizer)
        check_settings_off(self.name, optimizer, "nesterov", "dampening", "maximize")

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates the same parameter groups with LARS."""
        excluded: tuple[str, ...] = self.config.exclude_from_weight_decay
        is_excluded = (lambda name: any(part in name for part in excluded)) if excluded else None
        return LarsMomentum(optimizer, self.name, self.job, is_excluded, config=self.config)


class LarsMomentum(RuleWrapper):
    """SGD with momentum and layer-wise rates (You, Gitman and Ginsburg, 2017, arXiv 1708.03888, algorithm 1).

    With gradient g (the optimizer's own weight decay included), decay wd and learning rate lr::

        local = lr * coeff * |p| / (|g| + wd * |p| + eps)   if wd > 0 and |p| > 0 and |g| > 0, else lr
        v = momentum * v + local * (g + wd * p)
        p = p - v

    The learning rate is inside v, as in Paddle: a change of it scales only later gradients.
    """

    def __init__(self, *args: Any, config: LarsConfig) -> None:
        super().__init__(*args)
        self._config = config

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates the parameters of one group."""
        velocities = [local(self._velocity(p)) for p in parameters]
        decays = self.decays(parameters, self._config.lars_weight_decay)
        owners = parameters
        parameters = [local(p) for p in parameters]
        gradients = [local(gradient) for gradient in gradients]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        weight_norms = norms(parameters, owners)
        gradient_norms = norms(gradients, owners)
        decay = torch.tensor(decays, device=weight_norms.device)
        denominator = gradient_norms + decay * weight_norms + self._config.epsilon
        trusted = (decay > 0) & (weight_norms > 0) & (gradient_norms > 0)
        scale = torch.where(trusted, self._config.lars_coeff * weight_norms / denominator, 1.0)
        rates = (group["lr"] * scale).unbind()
        steps = torch._foreach_add(gradients, torch._foreach_mul(parameters, decays))
        torch._foreach_mul_(steps, [rate.to(step.dtype) for rate, step in zip(rates, steps, strict=True)])
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps)
        torch._foreach_sub_(parameters, velocities)

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer
