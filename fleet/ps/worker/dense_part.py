"""DensePart: one dense table and the parameters whose values it has, as flat arrays of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fleet.ps.client.shards import Rows
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.ids import copy_for_others

_HOST = torch.device("cpu")
_LARGE_BYTES = 1 << 18  # what the caches of two processors exchange as fast


@dataclass(frozen=True)
class GroupPlace:
    """A parameter group by its number, because ``load_state_dict`` replaces the dictionaries of an optimizer."""

    optimizer: Optimizer
    number: int

    def read(self) -> dict[str, Any]:
        """Returns the group as it is now."""
        group: dict[str, Any] = self.optimizer.param_groups[self.number]
        return group


@dataclass
class DensePart:
    """One dense table: the parameters of one optimizer group, flat, in the group's order."""

    table_id: int
    config: DenseTableConfig
    parameters: list[nn.Parameter]
    place: GroupPlace
    follows: bool = True
    names: Sequence[str] = ()
    _sum: tuple[Rows, list[Tensor]] | None = field(default=None, init=False, repr=False, compare=False)

    def rate(self) -> float | None:
        """Returns the learning rate that the table must have now; ``None`` where it has none."""
        return float(self.place.read()["lr"]) if self.follows else None

    def name_of(self, number: int) -> str:
        """Returns how messages name a parameter."""
        return repr(self.names[number]) if self.names else f"a parameter of shape {list(self.parameters[number].shape)}"

    def values(self, out: Rows | None = None) -> Rows:
        """Returns the parameters, written to ``out`` where given, float32 [size]."""
        return _flat([p.detach() for p in self.parameters], out)

    def gradients(self, out: Rows | None = None, *, for_others: bool = False) -> Rows | None:
        """Returns the gradients, written to ``out`` where given, float32 [size]; ``None`` if no parameter has one.

        They are zeros where only some have none. With ``for_others`` another process reads ``out`` next.
        """
        if not self.has_gradients():
            return None
        if out is not None and for_others and out.nbytes >= _LARGE_BYTES:
            found = [p.grad for p in self.parameters if p.grad is not None and _is_dense(p.grad)]
            if len(found) == len(self.parameters):
                copy_for_others([g.data_ptr() for g in found], [g.numel() for g in found], out)
                return out
        return _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters], out)

    def has_gradients(self) -> bool:
        """Returns whether any parameter has a gradient."""
        return any(p.grad is not None for p in self.parameters)

    @torch.no_grad()
    def add_gradients(self, total: Rows) -> None:
        """Adds the gradients to float32 [size], without a flat copy of them."""
        if self._sum is None or self._sum[0] is not total:  # one sum takes the gradients of many steps
            flat = torch.from_numpy(total).split([p.numel() for p in self.parameters])
            self._sum = total, [place.view(p.shape) for place, p in zip(flat, self.parameters, strict=True)]
        pairs = [(place, p.grad) for place, p in zip(self._sum[1], self.parameters, strict=True) if p.grad is not None]
        dense = [g if g.layout is torch.strided else g.to_dense() for _, g in pairs]
        torch._foreach_add_([place for place, _ in pairs], [g.to("cpu", torch.float32) for g in dense])

    @torch.no_grad()
    def assign(self, values: Rows, start: int = 0) -> None:
        """Copies ``values`` into the parameters, from element ``start`` of all."""
        if start == 0 and len(values) == self.config.size and all(map(_is_plain, self.parameters)):
            self._assign_plain(values)
            return
        whole = torch.from_numpy(values)
        end, at = start + len(whole), 0
        for parameter in self.parameters:
            first, last = max(at, start), min(at + parameter.numel(), end)
            part = whole[first - start : max(first, last) - start]
            if len(part) == parameter.numel():
                parameter.copy_(part.view(parameter.shape))
            elif len(part):
                flat = parameter.reshape(-1).clone()
                flat[first - at : last - at] = part
                parameter.copy_(flat.view(parameter.shape))
            at += parameter.numel()

    def _assign_plain(self, values: Rows) -> None:
        """Does :meth:`assign` for all values in half the time: numpy makes its views faster."""
        at = 0
        for parameter in self.parameters:
            own = parameter.detach().numpy()
            np.copyto(own, values[at : at + own.size].reshape(own.shape))
            at += own.size
        increment_version(self.parameters)


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether it is float32, strided and in the memory of the CPU."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _is_dense(tensor: Tensor) -> bool:
    return _is_plain(tensor) and tensor.is_contiguous() and not tensor.is_neg()


def _flat(tensors: Sequence[Tensor], out: Rows | None) -> Rows:
    parts = [(t.to_dense() if t.layout is not torch.strided else t).detach().reshape(-1) for t in tensors]
    if out is None:
        out = np.empty(sum(map(len, parts)), np.float32)
    whole = torch.from_numpy(out)
    devices = {part.device for part in parts}
    if devices <= {_HOST}:
        torch.cat(parts, out=whole)
    elif len(devices) == 1:
        whole.copy_(torch.cat(parts))  # one way to the host for all
    else:
        for place, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
            place.copy_(part)
    return out
