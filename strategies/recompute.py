"""recompute: chosen modules forget their activations after forward and compute them again in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.strategies._base import NOT_YET, Stage, Strategy, Values
from fleet.strategies._config import Config, setting

_NO_TUNER = "it belongs to Paddle's automatic parallelism, which has no counterpart here"


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Config, option="recompute_configs"):
    """Which modules are computed twice."""

    checkpoints: tuple[str, ...] = setting(
        [], "qualified names of the modules to recompute, as in model.named_modules()"
    )
    enable_offload: bool = setting(False, "keep the inputs of the recomputed modules in pinned host memory")
    checkpoint_shape: tuple[int, ...] = setting(
        [],
        "shape of an offloaded activation, for a static graph",
        at_least=1,
        no_meaning="torch knows the shape of every activation when it is computed",
    )
    enable_tuning: bool = setting(False, "let a tuner choose the modules", no_meaning=_NO_TUNER)
    refined_ops_patterns: tuple[dict[str, Any], ...] = setting(
        [], "operator patterns that are not recomputed", no_meaning=_NO_TUNER
    )


class Recompute(Strategy):
    """Wraps the named modules in activation checkpointing."""

    name = "recompute"
    meaning = "Trade time for memory: the named modules compute their activations again in backward."
    stage = Stage.MODULE
    Config = RecomputeConfig
    # Outside the modules that these put in place, so that what is computed twice is the final module.
    after = ("qat", "sync_batch_norm", "tensor_parallel")
    in_ps_job = True
    refused = NOT_YET
    model_effect = "computes the modules in recompute_configs['checkpoints'] a second time in backward"

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason why recompute without a named module cannot run."""
        if options["recompute_configs"].checkpoints:
            return None
        return (
            "recompute is on and recompute_configs['checkpoints'] is []; it names the modules to compute twice. "
            "Set recompute_configs = {'checkpoints': ['layer1', 'layer2']} with names from model.named_modules()."
        )
