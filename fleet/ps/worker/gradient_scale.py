"""A tensor whose gradient is multiplied on its way back, by the number of samples: what Paddle pushes for rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["scale_gradient"]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Returns ``tensor`` with the same values; backward multiplies its gradient by ``factor``.

    Example:
        >>> leaf = torch.ones(2, requires_grad=True)
        >>> scale_gradient(leaf, 3.0).sum().backward()
        >>> leaf.grad.tolist()
        [3.0, 3.0]
    """
    scaled: Tensor = _Scale.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled
