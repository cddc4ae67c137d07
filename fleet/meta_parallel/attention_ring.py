"""Ring attention: keys and values travel round the workers of a group, and every worker's queries meet all of them.

Tensors are ``[batch, heads, tokens, size]``. Attention to some of the keys comes with the log-sum-exp that merges it
with attention to the others. Scores are never kept: backward computes them again from the merged result and the merged
log-sum-exp, so that its terms for blocks of keys add up.

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

from fleet.strategies._shared.through_host import begin_receiving, begin_sending, needs_host
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.tensor_parallel.regions import applied

_ATEN: Any = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the attention of ``q`` to ``k`` and ``v``, and the log-sum-exp of its scores in float32."""
    kind = _kernel(q)
    if kind == "cpu":
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    elif kind == "flash":
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    else:
        scores = _scores(q, k, is_causal, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp().matmul(v.float()).to(q.dtype)
    return out, lse


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the terms that ``k`` and ``v`` add to the gradients of the queries, keys and values.

    Args:
        gradient: of the merged result.
        q: the queries.
        k: some of the keys.
        v: their values.
        out: the result merged over all keys.
        lse: its log-sum-exp.
        is_causal: hide later keys from earlier queries.
        scale: of the scores.
    """
    kind = _kernel(q)
    if kind == "cpu":
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
        return found[0], found[1], found[2]
    if kind == "flash":
        # The signature takes a random state, which the kernel does not read without dropout.
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, nothing, nothing,
            scale=scale,
        )  # fmt: skip
        return found[0], found[1], found[2]
    weights = (_scores(q, k, is_causal, scale) - lse.unsqueeze(-1)).exp()
    above = gradient.float()
    # The merged result, not this block's own: so the terms of all blocks add up to the whole gradient.
    delta = (above * out.float()).sum(-1, keepdim=True)
    inner = weights * (above.matmul(v.float().mT) - delta) * scale
    return inner.matmul(k.float()), inner.mT.matmul(q.float()), weights.mT.matmul(above)


def merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention to two sets of keys, in float32, from the attention to each."""
    # Both weights come from differences that are at most 0, so no exponential overflows.
    total = torch.logaddexp(lse, more_lse)
    first = (lse - total).exp().unsqueeze(-1)
    second = (more_lse - total).exp().unsqueeze(-1)
    return out * first + more.float() * second, total


def _kernel(q: Tensor) -> str:
    """Returns the name of torch's kernel that takes ``q``; ``'plain'`` for none."""
    if q.device.type == "cpu":
        return "cpu" if q.dtype in (torch.float32, torch.bfloat16) and q.shape[2] > 0 else "plain"
    # Other sizes need padding, which the kernel's own front end would do.
    fits = q.dtype in _HALVES and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return (
        "flash" if q.device.type == "cuda" and fits and torch.cuda.get_device_capability(q.device)[0] >= 8 else "plain"
    )


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q.float().matmul(k.float().mT) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


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
        # Merged in float32: rounding to 16 bits after every worker's keys would add up.
        out = q.new_zeros(q.shape, dtype=torch.float32)
        lse = None
        for origin, pair in _round(own, group):
            queries, keys, masked = _met(origin, group.rank(), q.shape[2], is_causal)
            more, more_lse = attend(q[:, :, queries].contiguous(), *_heads(pair[:, :, :, keys], q), masked, scale)
            if lse is None:  # the own keys come first, and every query meets at least itself
                out = more.float()
                lse = more_lse
            else:
                out[:, :, queries], lse[:, :, queries] = merged(out[:, :, queries], lse[:, :, queries], more, more_lse)
        result = out.to(q.dtype)
        assert lse is not None
        # Only the own keys are kept: the others travel round again in backward.
        ctx.save_for_backward(q, own, result, lse)
        ctx.group = group
        ctx.is_causal = is_causal
        ctx.scale = scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, own, out, lse = ctx.saved_tensors
        group = ctx.group
        above = gradients[0].contiguous()
        of_q = torch.zeros_like(q, dtype=torch.float32)
        travelling: Tensor | None = None  # the gradients of the keys that are here, of the workers before this one
        for origin, pair in _round(own, group):
            queries, keys, masked = _met(origin, group.rank(), q.shape[2], ctx.is_causal)
            parts = [t[:, :, queries].contiguous() for t in (above, q, out, lse)]
            dq, *of_pair = attend_backward(
                parts[0], parts[1], *_heads(pair[:, :, :, keys], q), parts[2], parts[3], masked, ctx.scale
            )
            of_q[:, :, queries] += dq
            # The gradients of keys follow them round the ring; each worker adds its term and passes them on.
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
    """Yields every worker's tensor with its rank in the group, the own first; the next arrives during the yield."""
    size = group.size()
    rank = group.rank()
    here = own
    for step in range(size):
        # The next pair is asked for before this one is used: its transfer runs beside the attention.
        coming = torch.empty_like(own)
        # No transfer follows the last use, because every worker still has its own pair.
        works = _passed(here, coming, group, _KEYS) if step < size - 1 else []
        yield (rank - step) % size, here
        _wait(works)
        here = coming


def _passed(tensor: Tensor, into: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Starts to send ``tensor`` to the next worker, and to receive ``into`` from the previous worker."""
    ranks = dist.get_process_group_ranks(group)
    rank = group.rank()
    there = ranks[(rank + 1) % len(ranks)]
    back = ranks[rank - 1]
    # Over the host the receive comes first: two workers that both send first would wait for each other.
    if needs_host(tensor, group):
        return [begin_receiving(into, back, group, tag), begin_sending(tensor, there, group, tag)]
    operations = [dist.P2POp(dist.isend, tensor, there, group, tag), dist.P2POp(dist.irecv, into, back, group, tag)]
    return list(dist.batch_isend_irecv(operations))


def _wait(works: list[Any]) -> None:
    for work in works:
        wait_for(work)


def _met(origin: int, rank: int, num_tokens: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """Returns which queries meet which keys of ``origin``, and whether later keys are hidden."""
    everything = slice(None)
    half = num_tokens // 2
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
