"""cudnn_exhaustive_search: cuDNN times its convolution algorithms and keeps the fastest."""

from __future__ import annotations

import torch
from torch import nn

from fleet.strategies._declare.strategy import Guide, Stage, Strategy


class CudnnExhaustiveSearch(Strategy):
    """Turns ``torch.backends.cudnn.benchmark`` on."""

    name = "cudnn_exhaustive_search"
    meaning = "Let cuDNN time its convolution algorithms at the first batch of each shape and keep the fastest."
    stage = Stage.MODULE
    in_ps_job = True
    model_effect = "sets torch.backends.cudnn.benchmark"
    guide = Guide(
        when="Convolutions whose input shapes do not change.",
        cost="A search at the first batch of each shape.",
        example={"cudnn_exhaustive_search": True},
    )

    @classmethod
    def notes(cls, options: object, world_size: int) -> tuple[str, ...]:
        """Returns the remark that there is no cuDNN on a machine without a GPU."""
        if torch.cuda.is_available():
            return ()
        return ("cudnn_exhaustive_search changes nothing on the CPU: cuDNN runs on NVIDIA GPUs only.",)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``; from then on cuDNN searches."""
        torch.backends.cudnn.benchmark = True
        return model
