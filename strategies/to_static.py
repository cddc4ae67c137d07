"""to_static: compile the model, our counterpart of Fleet's static-graph mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy


@dataclass(frozen=True, kw_only=True)
class ToStaticConfig(Config, option="to_static_configs"):
    """How the model is compiled; the keys are those of ``torch.compile``."""

    mode: str = setting(
        "default",
        "what the compiler spends its time on; 'reduce-overhead' records CUDA graphs",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    fullgraph: bool = setting(False, "raise at the first piece of Python that cannot be compiled, and do not split")
    dynamic: bool = setting(False, "compile once for all shapes; False compiles again for each new shape")


class ToStatic(Strategy):
    """Runs the wrapped module through ``torch.compile``."""

    name = "to_static"
    meaning = "Compile the model with torch.compile, the counterpart of Fleet's static graph."
    stage = Stage.COMPILE
    in_ps_job = True
    Config = ToStaticConfig
    model_effect = "compiles the wrapped module with torch.compile at its first call"
    guide = Guide(
        when="Steps are short, or the model has many element-wise operations.",
        cost="Compilation at the first batch of each shape; needs a C++ compiler on the CPU. Convolutions on the CPU "
        "keep the layout of their input: torch's own choice of layouts corrupts memory in version 2.13.",
        example={"to_static": True},
    )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that there are no CUDA graphs without a GPU."""
        if not options["build_strategy"].allow_cuda_graph_capture or torch.cuda.is_available():
            return ()
        return ("build_strategy.allow_cuda_graph_capture changes nothing on the CPU: CUDA graphs record a GPU.",)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns the compiled module; it is compiled at the first call with each shape."""
        config: ToStaticConfig = self.config
        # None lets the compiler notice by itself which sizes vary; False would recompile for each batch size.
        dynamic: Any = True if config.dynamic else None
        mode = None if config.mode == "default" else config.mode
        if mode is None and self.job.options["build_strategy"].allow_cuda_graph_capture:
            mode = "reduce-overhead"  # the other modes that may be set with it record CUDA graphs already
        how: dict[str, Any] = {"mode": mode}
        if self.job.device.type == "cpu":
            # torch 2.13 on one thread: compiled convolutions before batch norm write outside their buffers, and the
            # process dies in malloc (pytorch/pytorch#181618). They do not where each tensor keeps its own layout.
            how = {"options": {**torch._inductor.list_mode_options(mode or "default"), "layout_optimization": False}}
        return cast(nn.Module, torch.compile(model, fullgraph=config.fullgraph, dynamic=dynamic, **how))
