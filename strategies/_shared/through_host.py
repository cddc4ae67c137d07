"""Exchanges of GPU tensors that gloo makes in host memory only: workers that share a GPU exchange through gloo.

Its sums, copies and gathers take GPU tensors. A message from one worker to another would be read from the GPU's
address, and the gathering of a DTensor ends the process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.strategies._shared.waiting import wait_for

__all__ = ["begin_receiving", "begin_sending", "full_tensor", "needs_host"]


def needs_host(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Returns whether ``group`` exchanges ``tensor``, which is on a GPU, in host memory only."""
    return tensor.device.type == "cuda" and "nccl" not in str(dist.get_backend_config(group))


def begin_sending(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Any:
    """Does ``dist.isend``."""
    return dist.isend(tensor.cpu() if needs_host(tensor, group) else tensor, peer, group, tag)


def begin_receiving(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Any:
    """Does ``dist.irecv``."""
    if not needs_host(tensor, group):
        return dist.irecv(tensor, peer, group, tag)
    copy = torch.empty_like(tensor, device="cpu")
    return _Arriving(dist.irecv(copy, peer, group, tag), copy, tensor)


class _Arriving:
    """A tensor that is received on the host and then copied to its device."""

    def __init__(self, work: Any, copy: Tensor, into: Tensor) -> None:
        self._work = work
        self._copy = copy
        self._into = into

    def wait(self) -> None:
        """Returns when the tensor is on its device."""
        wait_for(self._work)
        self._into.copy_(self._copy)


def full_tensor(part: Any, *, grad_placements: Any = None) -> Tensor:
    """Returns the whole of ``part``, a DTensor, on its device; a collective call."""
    from torch.distributed.tensor import Replicate  # takes a second

    through_host = needs_host(part, part.device_mesh.get_group(0)) and any(
        place.is_shard() for place in part.placements
    )
    gathered = (part.cpu() if through_host else part).redistribute(placements=[Replicate()] * part.device_mesh.ndim)
    whole: Tensor = gathered.to_local(grad_placements=grad_placements)
    return whole.to(part.device)
