"""DenseWatch: notices what a script writes into dense parameters while the servers hold them.

Their next values would undo such a write without a word, as in a loop that clips weights after each step.

[Note: What shows a write]
Torch counts the changes of a parameter, but none through ``.data``. So each step also looks at a few elements of each
parameter and, the first times that the servers' values arrived and every 64th time, at all of them. A script may take
back what it wrote, as one that evaluates an average of the weights: what counts is whether values differ at the next
step, by more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.ps.client.shards import Rows
from fleet.ps.worker.dense_part import DensePart

MaskOf = Callable[[Tensor], Tensor | None]

_FIRST, _EVERY = 4, 64  # values of the servers that are compared as a whole
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
        is_excused: what is written before the next values from the servers passes.
        values: what the servers gave last, by table, float32 [size]; ``None`` where it was not kept.
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
        """Takes the parameters as they are now for what the servers gave: ``values`` by table, float32 [size]."""
        if values is None and self._parts and _compares(self._count + 1):
            values = {part.table_id: part.values() for part in self._parts}
        self.values = values
        self._marks = self._read_marks()
        self.is_excused = False

    def excuse(self) -> None:
        """Ignores what is written before the next values from the servers: the script was warned."""
        self.is_excused = True

    def check(self, ask: Callable[[], Mapping[int, Rows]], *, is_last: bool = True) -> None:
        """Checks that the parameters are what the servers gave.

        Args:
            ask: returns what they gave where it was not kept.
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
                was, held = float(own[place][first]), float(given[place][first])
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
