"""Texts and bytes between the workers of a group: JSON and tensors of bytes, so nothing that is received runs code."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_texts(text: str, group: Any, device: torch.device) -> list[str]:
    """Returns the text of every worker of ``group``, in rank order; a collective call."""
    # One byte more, because torch makes no tensor of an empty buffer.
    data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)[:-1].to(device)
    num_workers = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_workers)]
    dist.all_gather(sizes, torch.tensor([data.numel()], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(data, (0, longest - data.numel())), group=group)
    return [row[: int(size)].cpu().numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


@torch.no_grad()
def broadcast_bits(tensor: Tensor, source: int, group: Any) -> None:
    """Copies ``tensor``, contiguous and of any type, from the worker with the global rank ``source``, in place."""
    if tensor.numel():
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=source, group=group)
