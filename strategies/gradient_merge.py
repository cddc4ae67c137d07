"""gradient_merge: gradients of several batches are added up, exchanged once and applied once."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._base import NOT_YET, Stage, Strategy, Values
from fleet.strategies._config import Config, setting


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
    refused = NOT_YET
    model_effect = "exchanges gradients only in the backward pass of every k-th batch"
    optimizer_effect = "adds up gradients; every k-th step() updates and the next zero_grad() clears"

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one batch per update is what happens anyway."""
        if options["gradient_merge_configs"].k_steps > 1:
            return ()
        return ("gradient_merge changes nothing: gradient_merge_configs['k_steps'] is 1, one batch per update.",)
