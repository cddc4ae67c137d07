"""Sequences divided over the cp axis: the balanced split, and ring attention."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.meta_parallel.attention_ring import ring
from fleet.meta_parallel.segment_parallel import (
    axis_group,
    check_attention,
    check_parts,
    each,
    look_at_queries,
    note_rows,
    place_along,
    split_inputs_sequence_dim,
)

_Inputs = TypeVar("_Inputs", Tensor, dict[str, Tensor])


def split_inputs_sequence_dim_load_balance(
    inputs: _Inputs, rank: int | None = None, degree: int | None = None, dim: int = -1
) -> _Inputs:
    """Returns this worker's two parts of whole sequences: part ``rank`` and part ``2 * degree - 1 - rank``.

    Causal attention is then as much work for each worker.

    Args:
        inputs: a tensor ``[rows, tokens]``, or a dictionary of such tensors, with the tokens of whole sequences.
        rank: the place along cp; ``None`` is this worker's.
        degree: the number of workers along cp; ``None`` is the job's.
        dim: the dimension of the tokens.

    Raises:
        ConfigError: the tokens do not divide into ``2 * degree`` parts.

    Example:
        >>> split_inputs_sequence_dim_load_balance(torch.arange(8), rank=1, degree=2)
        tensor([2, 3, 4, 5])
    """
    rank, degree = place_along("cp", rank, degree, "split_inputs_sequence_dim_load_balance()")

    def two_parts(tokens: Tensor) -> Tensor:
        if degree == 1:
            return tokens
        check_parts(tokens, dim, 2 * degree, "split_inputs_sequence_dim_load_balance()", "cp_degree")
        parts = tokens.chunk(2 * degree, dim)
        return torch.cat([parts[rank], parts[2 * degree - 1 - rank]], dim)

    note_rows(inputs, "cp", degree)
    return each(inputs, two_parts)


def sequence_positions(num_tokens: int) -> Tensor:
    """Returns the positions of this worker's tokens in a sequence of ``num_tokens``, in the order it holds them.

    Along cp they have the balanced order (``split_inputs_sequence_dim_load_balance``), along sep they are a segment;
    with both, a segment of the balanced part.
    """
    return split_inputs_sequence_dim(split_inputs_sequence_dim_load_balance(torch.arange(num_tokens)))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    cp_group: Any = None,
) -> Tensor:
    """Returns the attention of this worker's tokens to the whole sequence; keys and values travel round the workers.

    No worker ever holds the whole sequence. Each sends its keys and values ``cp - 1`` times in forward; in backward
    again, together with their gradients in float32.

    Args:
        q: ``[b, s / cp, heads, d]``, this worker's tokens, with ``is_causal`` in the balanced order
            (``split_inputs_sequence_dim_load_balance``; ``sequence_positions`` are their positions).
        k: the same, or with fewer heads that several query heads share.
        v: as ``k``.
        is_causal: hide later tokens from earlier ones.
        dropout: 0 only.
        scale: of the scores; ``None`` is ``d ** -0.5``.
        cp_group: the workers; ``None`` is the cp axis of the job.

    Raises:
        UnsupportedOptionError: ``dropout`` is above 0.
        ConfigError: the shapes do not belong together.
    """
    group = axis_group("cp", cp_group, "ring_attention()")
    if dropout:
        raise UnsupportedOptionError(
            f"ring_attention(dropout={dropout!r}): a dropped weight would have to be the same in forward and backward "
            "of blocks that other workers hold. Set dropout=0 (dropout of the result works), or use sep_attention()."
        )
    check_attention(q, k, v, "ring_attention()")
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    if group is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
        )
        return out.transpose(1, 2)
    if is_causal and q.shape[1] % 2:
        raise ConfigError(
            f"ring_attention() got {q.shape[1]} tokens; in the balanced order each worker holds two equal parts. "
            f"Choose sequences that divide into {2 * group.size()} parts."
        )
    look_at_queries(q, k, group, "ring_attention()")
    return ring(query, key, value, group, is_causal, q.shape[3] ** -0.5 if scale is None else scale).transpose(1, 2)
