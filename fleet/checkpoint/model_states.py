"""ModelStates: the states of one wrapped module on its mesh: whole, this worker's part, and loading of both."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet.errors import CheckpointError, OptionWarning
from fleet.strategies._shared.parts import (
    PART,
    check_place,
    has_parts,
    is_part,
    local_state,
    mark_part,
    part_like,
    place_of,
)
from fleet.strategies._shared.whole_states import WholeStates, cut_state, layouts_of


class ModelStates:
    """Takes and loads the states of ``module``.

    Args:
        module: the user's module.
        whole: joins and cuts on this mesh.
        elsewhere: names that only other stages of the model hold.
    """

    def __init__(self, module: nn.Module, whole: WholeStates, elsewhere: Collection[str] = ()) -> None:
        self._module, self._whole, self.elsewhere = module, whole, elsewhere
        self._layouts = layouts_of(module)

    @property
    def is_part(self) -> bool:
        """Whether the module holds only a part of the model, apart from what sharding divides."""
        return self._whole.is_divided(self._layouts.values())

    def is_collective(self) -> bool:
        """Returns whether a whole state is made of what several workers hold."""
        return self.is_part or has_parts(self._module.state_dict())

    def whole(self, keep: bool) -> dict[str, Any]:
        """Returns the whole state on the host; a collective call where :meth:`is_collective` says so."""
        return self._whole.model(self._module.state_dict(), self._layouts, keep)

    def local(self) -> dict[str, Any]:
        """Returns this worker's part on the host, and whose it is."""
        state = local_state(self._module.state_dict())
        place = self._whole.place(self._layouts.values(), state.get(PART))
        return state if place is None else {**state, PART: place}

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the module's own ``state``, marked as a part where it is one."""
        place = self._whole.place(self._layouts.values())
        if place is not None:
            mark_part(state, place)
        return state

    def fitted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the module itself loads of ``state``, which is whole, a part, or has DTensors.

        Raises CheckpointError for the part of another worker.
        """
        own = self._module.state_dict()
        parts = [value for value in own.values() if is_part(value)]
        mine = self._whole.place(self._layouts.values(), place_of(parts[0]) if parts else None)
        saved = state.get(PART)
        if saved is not None:
            check_place(saved, mine or {"rank": 0, "degree": 1})
        elif (marked := getattr(state, PART, None)) is not None:
            check_place(marked, self._whole.place(self._layouts.values()) or {"rank": 0, "degree": 1})
        inner = place_of(parts[0]) if parts and saved is not None else None
        named = {name: value for name, value in state.items() if name != PART and name not in self.elsewhere}
        cut = cut_state(named, self._layouts)
        return {name: part_like(value, own.get(name), inner) for name, value in cut.items()}

    def load_from_rank_0(self, state: Mapping[str, Any]) -> None:
        """Loads the whole ``state`` of worker 0 on every worker; a collective call.

        Raises CheckpointError on every worker when it does not fit; nothing is changed then.
        """
        own = {name: value for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
        entries = self._whole.entries(own, self._layouts)
        alone = not dist.is_initialized()
        problem = self._whole.misfit(state, entries) if alone or dist.get_rank() == 0 else ""
        if alone:
            if problem:
                raise CheckpointError(problem)
            self._module.load_state_dict(self.fitted(state), strict=False)
            return
        bad = torch.tensor([bool(problem)], dtype=torch.uint8, device=self._whole.device)
        dist.broadcast(bad, src=0)
        if bad.item():
            raise CheckpointError(problem or "load_full_state_dict(): worker 0's state does not fit; it says why.")
        for parts in self._whole.parts_from(0, None, state, own, self._layouts, entries):
            laid_out = {name: part_like(part, own[name]) for name, part in parts.items()}
            self._module.load_state_dict(laid_out, strict=False)


def warn_of_stage_or_part(what: str) -> None:
    """Warns that a state is one worker's part of a ``what``; the warning points at the caller's caller."""
    warnings.warn(
        f"{what}.state_dict() holds this worker's part of the {what}: its stage, and its part of divided layers. To "
        f"save the whole state, call {what}.full_state_dict() on every worker and write what it returns on one; to "
        f"save parts, write {what}.local_state_dict() on every worker, each to a file of its own.",
        OptionWarning,
        stacklevel=3,
    )
