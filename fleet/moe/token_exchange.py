"""Exchanges of unequally many rows between the workers that share experts, which gradients cross the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fleet.errors import ConfigError
from fleet.strategies.tensor_parallel.regions import applied, group_of


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Returns the rows that the workers of ``group`` sent here, in their order; backward sends the gradients back.

    Args:
        rows: the rows to send, those for worker 0 first.
        sent: the number of them for each worker.
        received: the number from each worker.
        group: the workers; ``None`` for one alone.
    """
    if group is None:
        return rows
    return applied(_Exchange, rows, list(sent), list(received), group)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        into = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(into, rows.contiguous(), received, sent, group=group)
        return into

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Through apply, so that it can be differentiated again.
        return applied(_Exchange, gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def global_scatter(x: Tensor, local_count: Tensor, global_count: Tensor, group: Any = None) -> Tensor:
    """Returns the rows for the experts of this worker: for each of its experts those of worker 0, of worker 1, ...

    With ``n`` experts on each worker, entry ``i`` of the counts is about expert ``i % n`` of worker ``i // n``.

    Args:
        x: the rows of this worker, those of entry 0 of ``local_count`` first.
        local_count: how many rows go to each expert of each worker.
        global_count: how many rows come for each expert of this worker from each worker.
        group: the workers; ``None`` is the expert axis of the job.

    Raises:
        ConfigError: the counts do not fit ``x`` or the group.
    """
    workers, sent, received = _counts(x, local_count, global_count, group, "global_scatter()")
    rows = exchange_rows(x, sent.sum(1).tolist(), received.sum(1).tolist(), workers)
    return rows[expert_order(received)]


def global_gather(x: Tensor, local_count: Tensor, global_count: Tensor, group: Any = None) -> Tensor:
    """Returns to every worker the rows that :func:`global_scatter` sent from it, with the same counts."""
    workers, sent, received = _counts(x, global_count, local_count, group, "global_gather()", swapped=True)
    rows = x[expert_order(sent).argsort()]
    return exchange_rows(rows, sent.sum(1).tolist(), received.sum(1).tolist(), workers)


def expert_order(counts: Tensor) -> Tensor:
    """Returns the places of rows that stand by worker, then by expert, in the order by expert, then by worker.

    Example:
        >>> expert_order(torch.tensor([[1, 2], [1, 0]]))
        tensor([0, 3, 1, 2])
    """
    workers, experts = counts.shape
    cells = torch.arange(workers * experts, device=counts.device).repeat_interleave(counts.flatten())
    return (cells % experts * workers + cells // experts).argsort(stable=True)


def _counts(
    x: Tensor, local_count: Tensor, global_count: Tensor, group: Any, call: str, swapped: bool = False
) -> tuple[Any, Tensor, Tensor]:
    from fleet.moe.expert_mesh import expert_group

    workers = expert_group() if group is None else group_of(group)
    size = 1 if workers is None else workers.size()
    first = "global_count" if swapped else "local_count"
    for name, count in ((first, local_count), ("the other count", global_count)):
        if count.dim() != 1 or count.numel() % size:
            raise ConfigError(
                f"{call}: {name} has the shape {tuple(count.shape)}; it has one entry for each expert of each of the "
                f"{size} workers."
            )
    if int(local_count.sum()) != x.shape[0]:
        raise ConfigError(f"{call}: {first} adds up to {int(local_count.sum())} rows, and x has {x.shape[0]}.")
    return workers, local_count.long().view(size, -1), global_count.long().view(size, -1)
