"""Lookups in a tensor of rows whose gradients are summed on the CPU in the order of the ids.

The order of torch's ``embedding_bag`` depends on how many ids there are in all, so the same ids beside others would
have gradients with other last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fleet.ps.table.ids import sum_bags, sum_rows

MANY_IDS = 1 << 10  # from so many on a call of Python costs less than it saves


def picked(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the rows at ``places``, float32 [*places.shape, dim], as ``torch.embedding`` does."""
    if rows.requires_grad and rows.device.type == "cpu" and places.numel() >= MANY_IDS:
        found: Tensor = _ManyRows.apply(rows, places)  # type: ignore[no-untyped-call]
        return found
    return torch.embedding(rows, places)


def pooled(rows: Tensor, places: Tensor, starts: Tensor, mode: str) -> Tensor:
    """Returns the sum or mean of the rows of each bag, float32 [bags, dim], as ``F.embedding_bag`` does.

    Args:
        rows: float32 [u, dim], u > 0.
        places: int32 [n], places of rows.
        starts: int64 [bags], where each bag begins in ``places``.
        mode: "sum" or "mean".
    """
    if rows.requires_grad and rows.device.type == "cpu":
        found: Tensor = _PooledRows.apply(rows, places, starts, mode)  # type: ignore[no-untyped-call]
        return found
    return F.embedding_bag(places, rows, starts, mode=mode)


class _ManyRows(torch.autograd.Function):
    """``torch.embedding`` of rows on the CPU, whose backward takes half the time for many ids.

    The sums are torch's, bit for bit: both add in the order of the ids.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(rows)
        return torch.embedding(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # backward(create_graph=True)
            return torch.ops.aten.embedding_dense_backward(gradient, places, ctx.num_rows, -1, False), None
        rows = gradient.reshape(-1, gradient.shape[-1]).numpy()
        return torch.from_numpy(sum_rows(rows, places.reshape(-1).numpy(), ctx.num_rows)), None


class _PooledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, starts: Tensor, mode: str) -> Tensor:
        ctx.save_for_backward(places, starts)
        ctx.num_rows = len(rows)
        ctx.is_mean = mode == "mean"
        return F.embedding_bag(places, rows, starts, mode=mode)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        places, starts = ctx.saved_tensors
        if torch.is_grad_enabled():  # backward(create_graph=True)
            lengths = torch.diff(starts, append=starts.new_tensor([len(places)]))
            each = gradient / lengths.clamp(min=1)[:, None] if ctx.is_mean else gradient
            each = each.repeat_interleave(lengths, 0)
            return torch.ops.aten.embedding_dense_backward(each, places, ctx.num_rows, -1, False), None, None, None
        summed = sum_bags(gradient.numpy(), starts.numpy(), places.numpy(), ctx.num_rows, ctx.is_mean)
        return torch.from_numpy(summed), None, None, None
