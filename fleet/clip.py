"""Gradient clipping as Fleet scripts write it: ``grad_clip=ClipGradByGlobalNorm(1.0)`` of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.strategies._shared.norm import of_mesh

__all__ = ["ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue", "GradientClip"]


class GradientClip:
    """Clips the gradients of one update; a subclass says how."""

    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Changes ``gradients`` in place."""
        raise NotImplementedError


class ClipGradByGlobalNorm(GradientClip):
    """Scales all gradients by ``clip_norm / max(norm, clip_norm)``, where ``norm`` is their joint norm.

    Where a model is divided over ``mp`` or ``pp`` it is the norm of the whole model's gradients.

    Args:
        clip_norm: the largest norm that is not scaled; greater than 0.
    """

    def __init__(self, clip_norm: float = 1.0) -> None:
        self.clip_norm = _positive("ClipGradByGlobalNorm(clip_norm=...)", clip_norm)

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Changes ``gradients`` in place."""
        # Without gradients too: the workers of other stages wait for this one's share of the norm.
        norm = whole(torch.nn.utils.get_total_norm(list(gradients)))
        scale = self.clip_norm / norm.clamp(min=self.clip_norm)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))


class ClipGradByNorm(GradientClip):
    """Scales each gradient by ``clip_norm / max(norm, clip_norm)``, with the ``norm`` of the whole gradient."""

    def __init__(self, clip_norm: float = 1.0) -> None:
        self.clip_norm = _positive("ClipGradByNorm(clip_norm=...)", clip_norm)

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Changes ``gradients`` in place."""
        mesh = of_mesh()
        if mesh is None:
            norms = [whole(torch.linalg.vector_norm(gradient)) for gradient in gradients]
        else:
            norms = list(mesh.each(gradients))
        for gradient, norm in zip(gradients, norms, strict=True):
            gradient.mul_((self.clip_norm / norm.clamp(min=self.clip_norm)).to(gradient.device, gradient.dtype))


class ClipGradByValue(GradientClip):
    """Clamps every entry to the range ``min`` to ``max``; ``min`` defaults to ``-max``."""

    def __init__(self, max: float, min: float | None = None) -> None:
        low = -max if min is None else min
        if not low <= max:
            raise ConfigError(f"ClipGradByValue(max={max!r}, min={min!r}): min must not be above max.")
        self.min = float(low)
        self.max = float(max)

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Changes ``gradients`` in place."""
        for gradient in gradients:
            gradient.clamp_(self.min, self.max)


def whole(value: Tensor) -> Tensor:
    """Returns ``value`` as a plain tensor; a number that is spread over workers is summed first."""
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def _positive(label: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{label} got {value!r}; it must be greater than 0.")
    return float(value)
