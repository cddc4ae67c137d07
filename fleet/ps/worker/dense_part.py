"""DensePart: one dense table and its parameters, as flat arrays of a worker; DenseWatch notices writes of a script.

The servers' next values would undo such a write without a word, as in a loop that clips weights after each step.

[Note: What shows a write]
Torch counts the changes of a parameter, but none through ``.data``. So each step also looks at a few elements of each
parameter and, the first times that the servers' values arrived and every 64th time, at all of them. A script may undo a
write, as it does to evaluate an average of the weights: only values that differ at the next step, by more than
rounding, count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.ps.client.shards import Rows
from fleet.ps.table.dense_table import DenseTableConfig
from fleet.ps.table.ids import copy_for_others

_HOST = torch.device("cpu")
_LARGE_BYTES = 1 << 18  # up to here the caches of two processors exchange values as fast as memory does


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


MaskOf = Callable[[Tensor], Tensor | None]

# Values of the servers that are compared as a whole: the first ones, then every so many. A full comparison of each
# step would cost as much as copying the parameters.
_FIRST = 4
_EVERY = 64
_PROBES = 4
_ROUNDING = 2 * float(np.finfo(np.float32).eps)
_INSTEAD = (
    "Change parameters before fleet.init_worker(), compute what forward uses from them (weight.clamp(-1, 1)), or leave "
    "the dense parameters to the workers: strategy.hybrid_configs = {'dp_degree': fleet.worker_num()}."
)


class DenseWatch:
    """The values that the servers gave the parameters of some dense tables.

    Args:
        parts: the tables.
        mask_of: returns which elements of a parameter something else keeps at zero, as asp does; ``None`` for none.

    Attributes:
        is_excused: writes pass until the next values come from the servers.
        values: the servers' last values, by table, float32 [size]; ``None`` where they were not kept.
    """

    def __init__(self, parts: Sequence[DensePart], mask_of: MaskOf | None = None) -> None:
        self.values: Mapping[int, Rows] | None = None
        self._parts = parts
        self._parameters = [p for part in parts for p in part.parameters]
        self._mask_of = mask_of
        self._probes: list[tuple[int, Any]] = [(0, None)] * len(self._parameters)
        self._marks: list[Any] = []
        self._count = 0
        self.is_excused = True  # until there are values from the servers

    def note(self, values: Mapping[int, Rows] | None = None) -> None:
        """Notes that the parameters now hold the servers' ``values``, by table, float32 [size]."""
        if values is None and self._parts and _compares(self._count + 1):
            values = {part.table_id: part.values() for part in self._parts}
        self.values = values
        self._marks = self._read_marks()
        self.is_excused = False

    def excuse(self) -> None:
        """Ignores writes until the next values come from the servers: the script was warned."""
        self.is_excused = True

    def check(self, ask: Callable[[], Mapping[int, Rows]], *, is_last: bool = True) -> None:
        """Checks that the parameters hold the servers' values.

        Args:
            ask: returns those values where they were not kept.
            is_last: the next values may arrive before another check; without it not all elements are compared.

        Raises:
            ConfigError: the script has changed a parameter, or its dtype.
        """
        if self.is_excused or not self._parts:
            return
        self._count += is_last
        marks = self._read_marks()
        if marks == self._marks and not (is_last and _compares(self._count) and self.values is not None):
            return
        values = ask() if self.values is None else self.values
        for part in self._parts:
            self._compare(part, values[part.table_id])
        self._marks = marks

    def _compare(self, part: DensePart, given: Rows) -> None:
        for number, parameter in enumerate(part.parameters):
            if parameter.dtype is not torch.float32:
                raise _refusal(part.name_of(number), f"it is {parameter.dtype}, and the servers hold float32")
        own = part.values()
        if np.array_equal(own.view(np.uint32), given.view(np.uint32)):
            return
        # Adding and subtracting a number, as sharpness-aware training does, leaves a rounding error of the size of
        # their sum, and the numbers are as large as those of other parameters.
        allowed = _ROUNDING * np.abs(given).max(initial=0.0, where=np.isfinite(given))
        with np.errstate(invalid="ignore"):  # of infinities
            is_near = np.abs(own - given) <= allowed
        differs = ~is_near & (own.view(np.uint32) != given.view(np.uint32))
        start = 0
        for number, parameter in enumerate(part.parameters):
            place = slice(start, start + parameter.numel())
            mask = None if self._mask_of is None else self._mask_of(parameter)
            if mask is not None:
                differs[place] &= (own[place] != 0) | ~mask.numpy(force=True).reshape(-1)
            if differs[place].any():
                first = int(differs[place].argmax())
                was = float(own[place][first])
                held = float(given[place][first])
                raise _refusal(part.name_of(number), f"element {first} is {was:.9g}, and the servers have {held:.9g}")
            start = place.stop

    def _read_marks(self) -> list[Any]:
        found: list[Any] = []
        for number, parameter in enumerate(self._parameters):
            place = parameter.data_ptr()
            known, probe = self._probes[number]
            if known != place:
                probe = _probe(parameter)
                self._probes[number] = place, probe
            found += parameter._version, place, None if probe is None else probe.tobytes()
        return found


def _refusal(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"{name} was changed after fleet.init_worker() ({what}): the parameter servers hold it, so their next values "
        f"would undo the change. {_INSTEAD}"
    )


def _compares(count: int) -> bool:
    return count <= _FIRST or count % _EVERY == 0


def _probe(parameter: nn.Parameter) -> Any:
    """Returns a view of some elements that follows their values; ``None`` where there can be none."""
    if parameter.device.type != "cpu" or not parameter.is_contiguous() or parameter.dtype is torch.bfloat16:
        return None
    return parameter.detach().view(-1)[:: max(1, parameter.numel() // _PROBES)].numpy()
