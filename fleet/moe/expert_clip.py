"""Clipping by the norm of all gradients where experts are divided over workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fleet.clip import ClipGradByGlobalNorm


class ClipGradForMOEByGlobalNorm(ClipGradByGlobalNorm):
    """Clips by the norm of all gradients, in which every expert of the job counts once; Fleet's name.

    :class:`~fleet.clip.ClipGradByGlobalNorm` and ``torch.nn.utils.clip_grad_norm_`` do the same here: a ``MoELayer``
    marks its experts, and the norm is summed over the workers that share them.

    Args:
        clip_norm: the largest norm that is not scaled; greater than 0.
        is_expert_param_func: not called: the layer has marked its experts.
        moe_group: not used: the job knows it.
        group_name: not used: parameter groups are clipped together.
    """

    def __init__(
        self,
        clip_norm: float = 1.0,
        is_expert_param_func: Callable[[Tensor], bool] | None = None,
        moe_group: Any = None,
        group_name: str = "default_moe_group",
    ) -> None:
        super().__init__(clip_norm)
