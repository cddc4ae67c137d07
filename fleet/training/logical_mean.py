"""fleet.mean in a reproducible job: the gradient of the total, which the update divides by all counts at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers


def logical_mean(logical: LogicalWorkers, total: Tensor, count: float, update_count: float | None) -> Tensor:
    """Returns the mean of this batch, where it has a gradient with that of ``total``; see ``fleet.mean``.

    The tree adds the gradients of totals up, and divides their sum by the sum of the counts: every batch counts as it
    does in one process. So all terms of a loss count alike here.
    """
    if not (torch.is_grad_enabled() and total.requires_grad):
        return total / (count or 1.0)  # of this batch alone: the processes have unequal numbers of them
    if update_count is not None and logical.rounds_per_update == 1 and update_count != count:
        raise ConfigError(
            f"fleet.mean(total, count, update_count=...): with 'reproducible' an update has one batch of each logical "
            f"worker, and this one counts {count:.6g}; update_count is {update_count:.6g}. Leave it out."
        )
    if logical.is_counted and logical.count != count:
        raise ConfigError(
            f"fleet.mean(): two terms of one batch count {logical.count:.6g} and {count:.6g}. With 'reproducible' the "
            "gradients of an update are divided by one sum of counts. Bring both into one total, for example "
            "fleet.mean(losses.sum() + count * penalty, count)."
        )
    logical.is_counted = True
    logical.count = count
    value = 0.0 if count == 0 else float(total.detach()) / count
    found: Tensor = _Total.apply(total, value)  # type: ignore[no-untyped-call]
    return found


class _Total(torch.autograd.Function):
    """The value of a mean, with the gradient of its total."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: float) -> Tensor:
        """Returns ``value``, shaped and typed as ``total``."""
        return torch.full_like(total.detach(), value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Returns ``gradient`` as it is."""
        return gradient, None
