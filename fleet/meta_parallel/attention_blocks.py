"""Attention of some queries with some keys, with the log-sum-exp that merges it with attention to other keys.

Tensors are ``[batch, heads, tokens, size]``. Scores are never kept: backward computes them again from the merged result
and the merged log-sum-exp, so that its terms for blocks of keys add up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, nothing, nothing,
            scale=scale,
        )  # fmt: skip
        return found[0], found[1], found[2]
    weights = (_scores(q, k, is_causal, scale) - lse.unsqueeze(-1)).exp()
    above = gradient.float()
    delta = (above * out.float()).sum(-1, keepdim=True)
    inner = weights * (above.matmul(v.float().mT) - delta) * scale
    return inner.matmul(k.float()), inner.mT.matmul(q.float()), weights.mT.matmul(above)


def merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention to two sets of keys, in float32, from the attention to each."""
    total = torch.logaddexp(lse, more_lse)
    first, second = (lse - total).exp().unsqueeze(-1), (more_lse - total).exp().unsqueeze(-1)
    return out * first + more.float() * second, total


def _kernel(q: Tensor) -> str:
    """Returns which of torch's kernels takes ``q``; ``'plain'`` for none."""
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
