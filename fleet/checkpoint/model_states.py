"""ModelStates: the states of one wrapped module on its mesh: whole, this worker's part, and loading of both."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fleet.checkpoint.index import Index, TensorEntry
from fleet.checkpoint.items import Item, Wanted
from fleet.checkpoint.model_tensors import module_items
from fleet.checkpoint.to_group import VALUE, GroupSource, StateGroup, StateMesh, boxes_of, described
from fleet.errors import CheckpointError, OptionWarning
from fleet.strategies._shared.parameter_layout import cut, layouts_of
from fleet.strategies._shared.parts import (
    PART,
    check_place,
    has_parts,
    is_part,
    local_state,
    mark_part,
    part_like,
    place_of,
    shards_in,
)


class ModelStates:
    """Takes and loads the states of ``module`` as dictionaries.

    Args:
        module: the user's module.
        mesh: the place of this worker.
        elsewhere: names that only other stages of the model hold.
    """

    def __init__(self, module: nn.Module, mesh: StateMesh, elsewhere: Collection[str] = ()) -> None:
        self._module, self._mesh, self.elsewhere = module, mesh, elsewhere
        self._layouts = layouts_of(module)

    @property
    def is_part(self) -> bool:
        """Whether the module holds only a part of the model, apart from what sharding divides."""
        return self._mesh.is_divided(self._layouts.values())

    def is_collective(self) -> bool:
        """Returns whether a whole state is made of what several workers hold."""
        return self.is_part or has_parts(self._module.state_dict())

    def whole(self, keep: bool) -> dict[str, Any]:
        """Returns the whole state on the host; a collective call where :meth:`is_collective` says so.

        Raises CheckpointError where the workers of one stage hold different entries, or an entry cannot travel.
        """
        state = self._module.state_dict()
        here = StateGroup((self._mesh.axes.global_rank,), None, self._mesh.device)
        group = self._mesh.copy_group(shards_in(state.values())) if self.is_collective() else here
        items = self._items()
        posts = group.post({**self._posted(state, items), "boxes": boxes_of(items.values()), "keep": keep})
        stages = self._mesh.by_stage(posts, group.ranks)
        rows = {row[0]: row for post in reversed(stages) for row in post["entries"]}
        names = self._mesh.in_order([[row[0] for row in post["entries"]] for post in stages])
        wholes = group.gather([rows[name] for name in names], items, posts)
        found = dict(zip(names, wholes, strict=True))
        found |= {name: state[name] for name in names if rows[name][1] == VALUE and name in state}
        return found if keep else {}

    def _items(self) -> dict[str, Item]:
        return {item.name: item for item in module_items(self._module, self._mesh.axes)}

    def _posted(self, state: Mapping[str, Any], items: Mapping[str, Item]) -> dict[str, Any]:
        travels = self._mesh.has_stages
        entries = [described(name, value, items.get(name), travels) for name, value in state.items()]
        return {"stage": self._mesh.stage, "entries": entries}

    def local(self) -> dict[str, Any]:
        """Returns this worker's part on the host, and whose it is."""
        state = local_state(self._module.state_dict())
        place = self._mesh.place(self._layouts.values(), state.get(PART))
        return state if place is None else {**state, PART: place}

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the module's own ``state``, marked as a part where it is one."""
        place = self._mesh.place(self._layouts.values())
        if place is not None:
            mark_part(state, place)
        return state

    def fitted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the module itself loads of ``state``, which is whole, a part, or has DTensors.

        Raises CheckpointError for the part of another worker.
        """
        own = self._module.state_dict()
        saved, parts = state.get(PART), [value for value in own.values() if is_part(value)]
        inner = place_of(parts[0]) if parts and saved is not None else None
        marked = getattr(state, PART, None) if saved is None else saved  # a marked state has its DTensors
        if marked is not None:
            check_place(marked, self._mesh.place(self._layouts.values(), inner) or {"rank": 0, "degree": 1})
        named = {name: value for name, value in state.items() if name != PART and name not in self.elsewhere}
        return {name: part_like(self._cut(name, value), own.get(name), inner) for name, value in named.items()}

    def _cut(self, name: str, value: Any) -> Any:
        """Returns this worker's part of a whole tensor, and anything else as it is."""
        return cut(value, self._layouts.get(name)) if isinstance(value, Tensor) and not is_part(value) else value

    def load_from_rank_0(self, state: Mapping[str, Any]) -> None:
        """Loads the whole ``state`` of worker 0 on every worker; a collective call.

        Raises CheckpointError on every worker when it does not fit; nothing is changed then.
        """
        own = self._module.state_dict()
        items = self._items()
        group = StateGroup.of_everyone(self._mesh.device)
        posts = group.post(self._posted({name: own[name] for name in items}, items))
        shapes = {row[0]: tuple(row[2]) for post in self._mesh.by_stage(posts, group.ranks) for row in post["entries"]}
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        problem = _misfit(state, shapes) if is_first else ""
        dtypes = {} if problem or not is_first else {name: f"{state[name].dtype}"[len("torch.") :] for name in shapes}
        types = group.post(dtypes, CheckpointError(problem) if problem else None)[0]
        if not dist.is_initialized():
            self._module.load_state_dict(self.fitted(state), strict=False)
            return
        index = Index({name: TensorEntry(types[name], shape) for name, shape in shapes.items()})
        source = GroupSource(index, "load_full_state_dict()", group, state.__getitem__ if is_first else None)
        wanted = Wanted()
        for name, item in items.items():
            wanted.add(name, item.boxes)
        source.fill_all([wanted])
        self._module.load_state_dict({}, strict=False)  # for the hooks that a module has for loading


def _misfit(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns why ``state`` is not a whole state with tensors of these names and shapes, or an empty text."""
    missing = [name for name in shapes if not isinstance(state.get(name), Tensor)]
    strangers = [name for name, value in state.items() if isinstance(value, Tensor) and name not in shapes]
    others = [name for name in shapes if name not in missing and tuple(state[name].shape) != shapes[name]]
    found = [
        f"{what}: {names[:8]!r}"
        for what, names in (("missing", missing), ("not of this model", strangers), ("of another shape", others))
        if names
    ]
    return f"load_full_state_dict(): {'; '.join(found)}. It was saved from another model." if found else ""


def warn_of_stage_or_part(what: str) -> None:
    """Warns that a state is one worker's part of a ``what``; the warning points at the caller's caller."""
    warnings.warn(
        f"{what}.state_dict() holds this worker's part of the {what}: its stage, and its part of divided layers. To "
        f"save the whole state, call {what}.full_state_dict() on every worker and write what it returns on one; to "
        f"save parts, write {what}.local_state_dict() on every worker, each to a file of its own.",
        OptionWarning,
        stacklevel=3,
    )
