"""lamb: layer-wise adaptive moments, for Adam on very large batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.optimizer_kinds import check_adam, check_settings_off
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._shared.norm import norms
from fleet.strategies._shared.parts import local
from fleet.strategies._shared.update_rule import RuleWrapper


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
    optimizer_effect = "updates with LAMB in place of Adam's rule"
    guide = Guide(
        when="Adam at batch sizes of many thousands.",
        cost="Two norms per parameter and step.",
        formula="r = m / (sqrt(v) + eps) + wd p; p = p - lr |p| / |r| r",
        source="You et al., 2020, arXiv 1904.00962",
        example={"lamb": True, "lamb_configs": {"exclude_from_weight_decay": ["bias"]}},
    )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is Adam with nothing that LAMB lacks."""
        check_adam(self.name, optimizer)
        check_settings_off(self.name, optimizer, "amsgrad", "maximize", "weight_decay")

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates the same parameter groups with LAMB."""
        excluded: tuple[str, ...] = self.config.exclude_from_weight_decay
        is_excluded = (lambda name: name.endswith(excluded)) if excluded else None
        return LambAdam(optimizer, self.name, self.job, is_excluded, decay=self.config.lamb_weight_decay)


class LambAdam(RuleWrapper):
    """Adam's step with layer-wise trust ratios (You et al., 2020, arXiv 1904.00962, algorithm 2).

    With Adam's bias-corrected moments m and v, its betas and its eps, and decay wd::

        r = m / (sqrt(v) + eps) + wd * p
        p = p - lr * (|p| / |r| if both are > 0 else 1) * r
    """

    def __init__(self, *args: Any, decay: float) -> None:
        super().__init__(*args)
        self._decay = decay

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates the parameters of one group."""
        beta1, beta2 = group["betas"]
        states = [self._moments(p) for p in parameters]
        owners = parameters
        parameters = [local(p) for p in parameters]
        gradients = [local(gradient) for gradient in gradients]
        means = [local(state["exp_avg"]) for state in states]
        squares = [local(state["exp_avg_sq"]) for state in states]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        counts = [float(step) for step in steps]
        denominators = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(means, [1 - beta1**count for count in counts])
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, torch._foreach_mul(parameters, self.decays(owners, self._decay)))
        weight_norms = norms(parameters, owners)
        update_norms = norms(list(updates), owners)
        trusted = (weight_norms > 0) & (update_norms > 0)
        rates = (group["lr"] * torch.where(trusted, weight_norms / update_norms, 1.0)).unbind()
        torch._foreach_mul_(updates, [rate.to(update.dtype) for rate, update in zip(rates, updates, strict=True)])
        torch._foreach_sub_(parameters, updates)

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # On the host: reading it for the bias correction must not wait for the device.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
