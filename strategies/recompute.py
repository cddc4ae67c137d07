"""recompute: chosen modules forget their activations after forward and compute them again in backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._shared.module_names import check_patterns, find_modules
from fleet.strategies._shared.segments import run_segment

_NO_TUNER = "it belongs to Paddle's automatic parallelism, which has no counterpart here"


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Config, option="recompute_configs"):
    """Which modules are computed twice."""

    checkpoints: tuple[str, ...] = setting(
        [],
        "modules to recompute: qualified names as in model.named_modules(), or patterns such as 'layer*.0'; one that "
        "runs inside another is computed again with that one",
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
    # Outside the modules that these put in place, so that the final module is computed twice.
    after = ("qat", "sync_batch_norm", "tensor_parallel")
    in_ps_job = True
    model_effect = "computes the modules in recompute_configs['checkpoints'] a second time in backward"
    guide = Guide(
        when="Activations do not fit into memory. Name the blocks that repeat.",
        cost="The named modules compute forward twice: about a third more time where they are all of the model. "
        "The second run finds the buffers and the random generators of the first, and leaves no trace; a module whose "
        "second run gives another output (draws from numpy, a counter that is no buffer) is refused in the first "
        "backward passes.",
        formula="gradients are bit-equal to those without it",
        source="Chen et al., 2016, arXiv 1604.06174",
        example={"recompute": True, "recompute_configs": {"checkpoints": ["layer1"]}},
    )

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason why recompute without a named module cannot run."""
        if options["recompute_configs"].checkpoints:
            return None
        return (
            "recompute is on and recompute_configs['checkpoints'] is []; it names the modules to compute twice. "
            "Set recompute_configs = {'checkpoints': ['layer1', 'layer2']} with names from model.named_modules()."
        )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that offload has nowhere to go on a machine without a GPU."""
        if not options["recompute_configs"].enable_offload or torch.cuda.is_available():
            return ()
        return ("recompute_configs['enable_offload'] changes nothing on the CPU: the inputs are in host memory.",)

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError when a name or pattern in ``checkpoints`` fits no module."""
        check_patterns(model, self.config.checkpoints, "recompute_configs['checkpoints']", self.job)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; the named modules compute their activations again in backward."""
        found = find_modules(model, self.config.checkpoints)
        forwards = {name: RecomputedForward(name, module, self.config.enable_offload) for name, module in found.items()}
        for name, module in found.items():
            inside = [other for outer, other in forwards.items() if name.startswith(f"{outer}.")]
            forwards[name].outers = inside
            module.forward = forwards[name]
        return model


class RecomputedForward:
    """The forward of a module, run as a segment; everything else of the module stays as it is.

    A pattern such as ``"layers.*"`` names the modules inside a layer, too. Of segments inside each other torch keeps
    the recomputed activations until the end of backward.

    Attributes:
        outers: the forwards of modules around this one; while one of them runs, this one is part of its segment.
    """

    def __init__(self, name: str, module: nn.Module, offload: bool) -> None:
        self._name = f"{name!r}, a {type(module).__name__},"
        self._module = module
        self._inner = module.__dict__.get("forward")
        self._offload = offload
        self.outers: list[RecomputedForward] = []
        self._num_running = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward as a segment."""
        if any(outer._num_running for outer in self.outers):
            return self._own_forward(*args, **kwargs)
        offloaded: set[int] | None = None if self._offload else set()
        return run_segment(self._counted_forward, args, kwargs, [self._module], offloaded, name=self._name)

    def _counted_forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which takes no change of an object inside a segment
            return self._own_forward(*args, **kwargs)
        self._num_running += 1
        try:
            return self._own_forward(*args, **kwargs)
        finally:
            self._num_running -= 1

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)  # it may have become an embedding on servers
