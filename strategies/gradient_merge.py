"""gradient_merge: gradients of several batches are added up, exchanged once and applied once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import GradientKeeper, Guide, Stage
from fleet.strategies._gradients.accumulator import AccumulatingOptimizer, accumulate
from fleet.strategies._gradients.gradient_exchange import data_parallel_in
from fleet.strategies._gradients.passes import Passes, passes_of
from fleet.strategies._gradients.set_aside import SetAside

if TYPE_CHECKING:
    from fleet.job.job import Job


@dataclass(frozen=True, kw_only=True)
class GradientMergeConfig(Config, option="gradient_merge_configs"):
    """How many batches make an update."""

    k_steps: int = setting(1, "batches per update; 1 changes nothing", at_least=1)
    avg: bool = setting(True, "divide the sum of the gradients by k_steps")


class GradientMerge(GradientKeeper):
    """Updates at every k-th step with the gradients of k batches."""

    name = "gradient_merge"
    meaning = "Add up the gradients of k batches, then exchange and update once: a larger batch in the same memory."
    stage = Stage.STEP
    Config = GradientMergeConfig
    after = ("amp",)
    model_effect = "exchanges gradients only in the backward pass of every k-th batch"
    optimizer_effect = "adds up the gradients of each batch; every k-th step() updates, with the merged ones in .grad"
    guide = Guide(
        when="The batch you want does not fit into memory, or the network is slow.",
        cost="One copy of the gradients between updates, a second during backward; one exchange per k batches.",
        formula="g = (g_1 + ... + g_k) / k, or the sum when avg is False; update at every k-th step()",
        example={"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one batch per update is what happens anyway."""
        if options["gradient_merge_configs"].k_steps > 1:
            return ()
        return ("gradient_merge changes nothing: gradient_merge_configs['k_steps'] is 1, one batch per update.",)

    def __init__(self, config: Any, job: Job) -> None:
        """Starts without models and optimizers; each optimizer gets a window of ``k_steps`` batches."""
        super().__init__(config, job)
        self._models: list[Passes] = []
        self._windows: list[SetAside] = []

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError for LBFGS, which runs batches by itself."""
        if self.config.k_steps > 1 and isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "gradient_merge updates after several batches, and torch.optim.LBFGS runs its closure as often as it "
                "likes in one step(). Turn gradient_merge off, and let the closure take the whole batch."
            )

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; its backward passes exchange gradients in the last batch of a window only."""
        if self.config.k_steps > 1 and data_parallel_in(model) is not None:
            self._models.append(passes_of(model))
            accumulate(self._models[-1], self._windows)
        for window in self._windows:
            window.follow()
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer that updates at every ``k_steps``-th call."""
        if self.config.k_steps == 1:
            return optimizer
        window = SetAside(
            self.name, self._windows, per_update=self.config.k_steps, average=self.config.avg, models=self._models,
            global_rank=self.job.global_rank,
        )  # fmt: skip
        self._windows.append(window)
        return AccumulatingOptimizer(optimizer, window)

    def note_parameters(self, model: nn.Module, added: Mapping[str, nn.Parameter]) -> None:
        """Merges the gradients of parameters that were unfrozen, too."""
        for window in self._windows:
            window.note_parameters()

    def merges(self) -> bool:
        """Returns whether ``k_steps`` is above 1."""
        return bool(self.config.k_steps > 1)

    def averaged_batches(self) -> int:
        """Returns ``k_steps``, unless gradients are only added up."""
        return int(self.config.k_steps) if self.config.avg else 1

    def held_gradients(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the gradients of ``parameters`` that the windows have set aside."""
        for window in self._windows:
            yield from window.held(parameters)

    def note_clear(self, parameters: Sequence[Tensor]) -> None:
        """Drops the gradients of the present batch from the windows of ``parameters``."""
        for window in self._windows:
            window.note_clear(parameters)
