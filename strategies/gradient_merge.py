"""gradient_merge: gradients of several batches are added up, exchanged once and applied once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleet.strategies._base import Guide, Stage, Strategy, Values
from fleet.strategies._config import Config, setting
from fleet.strategies._exchange import data_parallel_in
from fleet.strategies._merging import MergingOptimizer, Window


@dataclass(frozen=True, kw_only=True)
class GradientMergeConfig(Config, option="gradient_merge_configs"):
    """How many batches make an update."""

    k_steps: int = setting(1, "batches per update; 1 changes nothing", at_least=1)
    avg: bool = setting(True, "divide the sum of the gradients by k_steps")


class GradientMerge(Strategy):
    """Updates at every k-th step with the gradients of k batches."""

    name = "gradient_merge"
    meaning = "Add up the gradients of k batches, then exchange and update once: a larger batch in the same memory."
    stage = Stage.STEP
    Config = GradientMergeConfig
    after = ("amp",)
    model_effect = "exchanges gradients only in the backward pass of every k-th batch"
    optimizer_effect = "adds up gradients; every k-th step() updates and the next zero_grad() clears"
    guide = Guide(
        when="The batch you want does not fit into memory, or the network is slow.",
        cost="One copy of the gradients between updates; one exchange per k batches.",
        formula="g = (g_1 + ... + g_k) / k, or the sum when avg is False; update at every k-th step()",
        example={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one batch per update is what happens anyway."""
        if options["gradient_merge_configs"].k_steps > 1:
            return ()
        return ("gradient_merge changes nothing: gradient_merge_configs['k_steps'] is 1, one batch per update.",)

    def __init__(self, config: Any, session: Any) -> None:
        """Starts a window of ``k_steps`` batches."""
        super().__init__(config, session)
        self.window = Window(config.k_steps, config.avg)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; its backward passes exchange gradients in the last batch of a window only."""
        reducer = data_parallel_in(model)

        def before_forward(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                if reducer is not None:
                    reducer.require_backward_grad_sync = self.window.is_last
                self.window.restore()

        if self.config.k_steps > 1:
            model.register_forward_pre_hook(before_forward)
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates at every ``k_steps``-th call."""
        if self.config.k_steps == 1:
            return optimizer
        return MergingOptimizer(optimizer, self.window, self.session.global_rank, self.name)
