"""Embeddings with ``max_norm``: their forward writes into the weight, in the rows of the ids that this worker has."""

from __future__ import annotations

from torch import nn

from fleet.errors import UnsupportedOptionError

__all__ = ["check_renormalized"]


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
