"""Ring attention: keys and values travel round the workers of a group, and every worker's queries meet all of them.

[Note: The balanced order]
With ``n`` workers the sequence is cut into ``2 n`` parts, and worker ``r`` holds parts ``r`` and ``2 n - 1 - r``, so
that causal attention is equal work for all. Keys that came from worker ``j`` then need no mask, except a worker's own:

- ``j < r``: its first part comes before both parts of the queries, its second after both;
- ``j > r``: both its parts come before the second part of the queries and after the first.

Backward sends the keys and values round once more, and their gradients with them; after the last step they are one
worker short of home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fleet.meta_parallel.attention_blocks import attend, attend_backward, merged
from fleet.strategies._shared.through_host import begin_receiving, begin_sending, needs_host
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.tensor_parallel.regions import applied

_KEYS, _GRADIENTS = 0, 1  # tags: two streams of messages between the same workers


def ring(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, is_causal: bool, scale: float) -> Tensor:
    """Returns the attention of this worker's queries to the keys of all workers; ``[batch, heads, tokens, size]``.

    Keys and values may have fewer heads. With ``is_causal`` the tokens are in the balanced order.
    """
    return applied(_Ring, q, k, v, group, is_causal, scale)


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, is_causal: bool, scale: float
    ) -> Tensor:
        own = torch.stack([k, v])
        out, lse = q.new_zeros(q.shape, dtype=torch.float32), None
        for origin, pair in _round(own, group):
            queries, keys, masked = _met(origin, group.rank(), q.shape[2], is_causal)
            more, more_lse = attend(q[:, :, queries].contiguous(), *_heads(pair[:, :, :, keys], q), masked, scale)
            if lse is None:  # the own keys come first, and every query meets at least itself
                out, lse = more.float(), more_lse
            else:
                out[:, :, queries], lse[:, :, queries] = merged(out[:, :, queries], lse[:, :, queries], more, more_lse)
        result = out.to(q.dtype)
        assert lse is not None
        ctx.save_for_backward(q, own, result, lse)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, own, out, lse = ctx.saved_tensors
        group, above = ctx.group, gradients[0].contiguous()
        of_q = torch.zeros_like(q, dtype=torch.float32)
        travelling: Tensor | None = None  # the gradients of the keys that are here, of the workers before this one
        for origin, pair in _round(own, group):
            queries, keys, masked = _met(origin, group.rank(), q.shape[2], ctx.is_causal)
            parts = [t[:, :, queries].contiguous() for t in (above, q, out, lse)]
            dq, *of_pair = attend_backward(
                parts[0], parts[1], *_heads(pair[:, :, :, keys], q), parts[2], parts[3], masked, ctx.scale
            )
            of_q[:, :, queries] += dq
            arrived = torch.zeros_like(own, dtype=torch.float32)
            if travelling is not None:
                _wait(_passed(travelling, arrived, group, _GRADIENTS))
            arrived[:, :, :, keys] += torch.stack([_joined(d, own.shape[2]) for d in of_pair])
            travelling = arrived
        assert travelling is not None
        home = torch.empty_like(travelling)
        _wait(_passed(travelling, home, group, _GRADIENTS))
        return of_q.to(q.dtype), home[0].to(q.dtype), home[1].to(q.dtype), None, None, None


def _round(own: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yields every worker's tensor with its rank in the group, the own one first; the next arrives meanwhile."""
    size, rank, here = group.size(), group.rank(), own
    for step in range(size):
        coming = torch.empty_like(own)
        works = _passed(here, coming, group, _KEYS) if step < size - 1 else []
        yield (rank - step) % size, here
        _wait(works)
        here = coming


def _passed(tensor: Tensor, into: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Starts to send ``tensor`` to the next worker, and to receive ``into`` from the one before."""
    ranks, rank = dist.get_process_group_ranks(group), group.rank()
    there, back = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    if needs_host(tensor, group):
        return [begin_receiving(into, back, group, tag), begin_sending(tensor, there, group, tag)]
    operations = [
        dist.P2POp(dist.isend, tensor, there, group, tag),
        dist.P2POp(dist.irecv, into, back, group, tag),
    ]
    return list(dist.batch_isend_irecv(operations))


def _wait(works: list[Any]) -> None:
    for work in works:
        wait_for(work)


def _met(origin: int, rank: int, num_tokens: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """Returns which queries meet which keys of ``origin``, and whether later keys are hidden."""
    everything, half = slice(None), num_tokens // 2
    if not is_causal or origin == rank:
        return everything, everything, is_causal
    return (everything, slice(half), False) if origin < rank else (slice(half, None), everything, False)


def _heads(pair: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values with as many heads as the queries."""
    times = q.shape[1] // pair.shape[2]
    wide = pair.repeat_interleave(times, 2) if times > 1 else pair
    return wide[0].contiguous(), wide[1].contiguous()


def _joined(gradient: Tensor, num_heads: int) -> Tensor:
    """Returns the gradient of heads that several query heads share."""
    shared: Tensor = gradient.float().unflatten(1, (num_heads, -1))
    return shared.sum(2)
