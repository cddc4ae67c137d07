"""Values of a forward and backward pass that were not finite, remembered on the device until somebody asks.

Looking at a tensor starts one reduction on its device (the largest absolute value, which a NaN survives) and does not
wait for it. The host waits once, when :meth:`Sightings.first` or :meth:`Sightings.any_bad` is read.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleet.strategies._shared.parts import local


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor was seen: ``kind`` is input, output, gradient or parameter; ``name`` is qualified.

    ``micro_batch`` counts the forward passes of the model since the last step.
    """

    kind: str
    name: str
    slot: int = 0
    module: nn.Module | None = None
    micro_batch: int = 0

    @property
    def is_backward(self) -> bool:
        """Whether it was seen in a backward pass."""
        return self.kind in ("gradient", "parameter")


class Sightings:
    """The tensors of the passes since the last :meth:`clear`, in the order in which they were computed."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._largest: list[Tensor] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def is_new(self, tensor: Tensor) -> bool:
        """Returns whether this value of ``tensor`` is asked about for the first time in this forward."""
        if tensor.is_inference():
            return True  # such tensors do not count their changes
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return False
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version)
        return True

    def end_forward(self) -> None:
        """Forgets which tensors were asked about; the values seen in them stay."""
        self._known.clear()

    @torch.no_grad()
    def add(self, tensor: Tensor, place: Place) -> None:
        """Looks at ``tensor``; without a floating type, or without entries, it is always finite."""
        values = local(tensor.detach())
        if values.is_sparse:
            values = values._values()
        if values.layout != torch.strided or not (values.is_floating_point() or values.is_complex()):
            return
        if values.numel() == 0 or values.element_size() == 1:  # vector_norm takes no 8-bit types
            return
        self._largest.append(torch.linalg.vector_norm(values, math.inf))
        self._places.append(place)

    @torch.no_grad()
    def any_bad(self, device: torch.device) -> Tensor:
        """Returns, on ``device`` and without waiting, 1 when something was not finite and 0 otherwise, shape [1]."""
        found = torch.zeros(1, dtype=torch.int32, device=device)
        for _, values in self._by_kind():
            found |= (~values.isfinite()).any().to(device=device, dtype=torch.int32)
        return found

    @torch.no_grad()
    def first(self) -> tuple[int, Place, str] | None:
        """Returns number, place and 'NaN' or 'Inf' of the first value that was not finite; waits for the device."""
        best: tuple[int, str] | None = None
        for places, values in self._by_kind():
            bad = [
                (place, value) for place, value in zip(places, values.tolist(), strict=True) if not math.isfinite(value)
            ]
            if bad and (best is None or bad[0][0] < best[0]):
                best = bad[0][0], "NaN" if math.isnan(bad[0][1]) else "Inf"
        return None if best is None else (best[0], self._places[best[0]], best[1])

    def clear(self) -> None:
        """Forgets everything."""
        self._places.clear()
        self._largest.clear()
        self._known.clear()

    def _by_kind(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yields the values of one type and device, stacked, with their places in order."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, value in enumerate(self._largest):
            kinds.setdefault((value.dtype, value.device), []).append(place)
        for places in kinds.values():
            yield places, torch.stack([self._largest[place] for place in places])


def tensors_in(value: Any) -> list[tuple[int, Tensor]]:
    """Returns the tensors in nested tuples, lists and dictionaries, each with its place among all entries."""
    return [(slot, leaf) for slot, leaf in enumerate(tree_leaves(value)) if isinstance(leaf, Tensor)]


def described(place: Place, kind: str, *, is_root: bool, stage: int = 0) -> str:
    """Returns a sentence about the first value that was not finite.

    Args:
        place: where it was seen.
        kind: 'NaN' or 'Inf'.
        is_root: whether the module is the whole model, or all layers of a pipeline stage.
        stage: the number of that stage.
    """
    if place.kind == "parameter":
        return (
            f"{kind} first appears in the gradient of parameter {place.name!r}; the gradients that flow into the "
            "modules' outputs were finite up to there, and so was forward."
        )
    module = f"module {place.name!r} ({type(place.module).__name__})" if place.name else "the model"
    if place.kind == "gradient":
        return (
            f"{kind} first appears in backward, in the gradient that flows into output {place.slot} of {module}; "
            "forward was finite."
        )
    if place.kind == "input":
        came = "it came with the batch" if stage == 0 else f"it came from pipeline stage {stage - 1}"
        origin = came if is_root else f"it was computed between modules, before {module} was called"
        return f"{kind} first appears in input {place.slot} of {module}: {origin}."
    holds = non_finite_weight(place.module)
    cause = f"its {holds} holds one already" if holds else "its inputs and its own weights were finite"
    return f"{kind} first appears in forward, in output {place.slot} of {module}: {cause}."


@torch.no_grad()
def non_finite_weight(module: nn.Module | None) -> str | None:
    """Returns which parameter or buffer of ``module`` itself is not finite, in words, or ``None``."""
    if module is None:
        return None
    own = {**module._parameters, **module._buffers}
    for name, tensor in own.items():
        values = None if tensor is None else local(tensor)
        if values is not None and values.is_floating_point() and not bool(values.isfinite().all()):
            return f"{'parameter' if name in module._parameters else 'buffer'} {name!r}"
    return None
