"""Collectives over many tensors with few messages: tensors of one type travel in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.strategies._gradients.exchange_names import named_exchange

# A flat copy of the whole model would double its memory; 64 MiB is large enough for the wire to be busy.
_CHUNK_BYTES = 64 * 1024 * 1024
# torch 2.13 renamed them and warns about the older names.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
sum_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@torch.no_grad()
def broadcast_from_rank_0(tensors: Sequence[Tensor], group: Any) -> None:
    """Makes ``tensors`` equal those of rank 0 of ``group``, in place."""
    for chunk in chunks(tensors):
        flat = flattened(chunk)
        dist.broadcast(flat, group=group, group_src=0)
        copy_back(flat, chunk)


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: Any, strategy: str = "average") -> None:
    """Replaces ``tensors`` by their mean over the workers of ``group``, in place; profilers show ``strategy``."""
    num_workers = dist.get_world_size(group)
    for number, chunk in enumerate(chunks(tensors)):
        flat = flattened(chunk)
        with named_exchange(strategy, flat, f"bucket {number}"):
            dist.all_reduce(flat, group=group)
        copy_back(flat.div_(num_workers), chunk)


def chunks(tensors: Sequence[Tensor], limit_bytes: float | None = None) -> Iterator[list[Tensor]]:
    """Yields lists of tensors of one type and device, in an order that is the same on every worker.

    A list ends with the tensor that reaches ``limit_bytes``, 64 MiB by default.
    """
    limit_bytes = _CHUNK_BYTES if limit_bytes is None else limit_bytes
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        chunk: list[Tensor] = []
        size = 0
        for tensor in same:
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= limit_bytes:
                yield chunk
                chunk = []
                size = 0
        if chunk:
            yield chunk


def flattened(chunk: list[Tensor]) -> Tensor:
    """Returns the elements of ``chunk`` one after the other, copied."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in chunk])


def copy_back(flat: Tensor, chunk: list[Tensor]) -> None:
    """Copies ``flat`` into the tensors that :func:`flattened` took it from."""
    for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
        tensor.copy_(part.view_as(tensor))
