"""Embeddings that depend on which ids this worker has: with ``max_norm`` and with ``scale_grad_by_freq``."""

from __future__ import annotations

from torch import nn

from fleet.errors import UnsupportedOptionError

__all__ = ["check_counted", "check_renormalized"]


def check_renormalized(
    model: nn.Module, why: str = "the others do not see it, so the workers would train different weights"
) -> None:
    """Raises UnsupportedOptionError when a trained embedding of ``model`` has ``max_norm``; ``why`` says the reason.

    Frozen ones pass: whenever a row is renormalized, a lookup gives the same.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        if module.weight.requires_grad:
            kind = type(module).__name__
            raise UnsupportedOptionError(
                f"{kind} {name!r} has max_norm={module.max_norm!r}, with which forward writes into the rows of this "
                f"worker's own ids: {why}. Omit it, and bound what the lookup returns: rows * (max_norm / "
                "rows.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )


def check_counted(model: nn.Module) -> None:
    """Raises UnsupportedOptionError when a trained embedding of ``model`` divides gradients by counts of ids."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            if not module.weight.requires_grad:
                continue
            raise UnsupportedOptionError(
                f"{type(module).__name__} {name!r} has scale_grad_by_freq=True, which divides the gradient of a row by "
                "how often its id is in the batch. Each worker would count in its own part of the batch, and the mean "
                "of these gradients is not that of the whole batch. Omit it."
            )
