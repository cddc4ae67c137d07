"""State dictionaries: the states of a wrapped module and of its optimizer, whole or a part, and loading.

[Note: Places]
An optimizer's state names a parameter by its place in the parameter groups. In a whole state that is the place in one
process: with a pipeline each group holds the parameters of all stages, in the order of the layers.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleet.checkpoint.index import Index, TensorEntry
from fleet.checkpoint.items import Item, Wanted
from fleet.checkpoint.model_tensors import module_items
from fleet.checkpoint.optimizer_tensors import OptimizerTensors
from fleet.checkpoint.to_group import VALUE, GroupSource, StateGroup, StateMesh, boxes_of, described
from fleet.errors import CheckpointError, OptionWarning
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parameter_layout import Layout, cut, layout_of, layouts_of
from fleet.strategies._shared.parts import (
    PART,
    check_place,
    has_parts,
    is_part,
    local_state,
    mark_part,
    part_like,
    place_of,
    rows_of,
    shards_in,
    whole_state,
)

_NO_STATE = {"rank": 0, "degree": 1}


class ModelStates:
    """Gathers and loads the states of ``module`` as dictionaries.

    Args:
        module: the user's module.
        mesh: the place of this worker.
        elsewhere: names that only other stages of the model hold.
    """

    def __init__(self, module: nn.Module, mesh: StateMesh, elsewhere: Collection[str] = ()) -> None:
        self._module = module
        self._mesh = mesh
        self.elsewhere = elsewhere
        self._layouts = layouts_of(module)

    @property
    def is_part(self) -> bool:
        """Whether the module holds only a part of the model, apart from what sharding divides."""
        return self._mesh.is_divided(self._layouts.values())

    def is_collective(self) -> bool:
        """Returns whether several workers hold parts of the whole state."""
        return self.is_part or has_parts(self._module.state_dict())

    def whole(self, keep: bool) -> dict[str, Any]:
        """Returns the whole state on the host; a collective call where :meth:`is_collective` says so.

        Raises CheckpointError where the workers of one stage hold different entries, or an entry cannot travel.
        """
        state = self._module.state_dict()
        # A group of one worker exchanges nothing: an undivided model goes the same way as a divided one.
        here = StateGroup((self._mesh.axes.global_rank,), None, self._mesh.device)
        group = self._mesh.copy_group(shards_in(state.values())) if self.is_collective() else here
        items = self._items()
        posts = group.post({**self._posted(state, items), "boxes": boxes_of(items.values()), "keep": keep})
        stages = self._mesh.by_stage(posts, group.ranks)
        # Of a name that several stages have, as that of a tied weight, the first stage's entry counts.
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
        """Returns this worker's part on the host, with an entry for its place in the whole."""
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
        """Returns the entries of ``state`` (whole, a part, or with DTensors) as the module itself loads them.

        Raises CheckpointError for the part of another worker.
        """
        own = self._module.state_dict()
        saved = state.get(PART)
        parts = [value for value in own.values() if is_part(value)]
        inner = place_of(parts[0]) if parts and saved is not None else None
        marked = getattr(state, PART, None) if saved is None else saved  # a marked state has its DTensors
        if marked is not None:
            check_place(marked, self._mesh.place(self._layouts.values(), inner) or _NO_STATE)
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
        # The error of worker 0 ends the load on all workers, before any tensor travels.
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


class OptimizerStates:
    """Gathers and loads the states of ``optimizer`` as dictionaries.

    Args:
        optimizer: the distributed optimizer; its own ``state_dict`` is not called.
        mesh: the place of this worker.
        models: the wrapped models, which name the parameters.
    """

    def __init__(self, optimizer: OptimizerWrapper, mesh: StateMesh, models: Sequence[nn.Module]) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        names: dict[Tensor, str] = {  # the first name of a parameter counts
            parameter: f"{name}@{number}" if number else name
            for number, model in reversed(list(enumerate(models)))
            for name, parameter in model.named_parameters()
        }
        self._tensors = OptimizerTensors("", optimizer, names, mesh.axes)

    @property
    def is_part(self) -> bool:
        """Whether the optimizer updates only a part of the model, apart from what sharding divides."""
        return self._mesh.is_divided(self._held())

    def is_collective(self, state: Mapping[str, Any]) -> bool:
        """Returns whether several workers hold parts of the whole ``state``."""
        return self.is_part or self._tensors.partitioned is not None or has_parts(state)

    def is_collective_load(self, state: Mapping[str, Any]) -> bool:
        """Returns whether loading ``state`` needs the other stages."""
        return self._mesh.has_stages and PART not in state

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's own ``state``, with an entry and a mark for the place of a part."""
        place = self._mesh.place(self._held(), state.get(PART))
        if place is None or not self.is_part:
            return state
        found: dict[str, Any] = OrderedDict({**state, PART: place})
        mark_part(found, place)
        return found

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns this worker's part on the host, with an entry for its place in the whole."""
        found = local_state(state)
        place = self._mesh.place(self._held(), found.get(PART))
        return found if place is None else {**found, PART: place}

    def loaded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``state``, whole or a part, as the optimizer itself loads it; with a pipeline a collective call.

        Raises CheckpointError for the part of another worker, or a state of another model.
        """
        if PART in state:
            return self._own_part(state)
        if not self.is_part:
            return dict(state)
        entries = {}
        for place, saved in enumerate(self._saved_places(state)):
            entry = state["state"].get(saved)
            if entry is not None:
                layout = layout_of(self._tensors.parameters[place])
                entries[place] = {k: cut(v, layout) if isinstance(v, Tensor) else v for k, v in entry.items()}
        # The optimizer numbers its own parameters from 0, whatever their places in the whole state are.
        places = count()
        groups = zip(state["param_groups"], self._tensors.group_names(), strict=True)
        kept = [{**group, "params": [next(places) for _ in own]} for group, own in groups]
        return {**state, "state": entries, "param_groups": kept}

    def _saved_places(self, state: Mapping[str, Any]) -> list[Any]:
        """Returns the place in ``state`` for each place in this optimizer; with a pipeline a collective call."""
        saved = [list(group["params"]) for group in state["param_groups"]]
        own = self._own_groups()
        groups = self._groups() if self._mesh.has_stages else own
        lengths = [len(places) for places in saved]
        # The lengths alone tell this worker's own part, once it has lost its mark, from a whole state.
        if lengths == [len(names) for names in own] != [len(names) for names in groups]:
            groups = own
        if lengths != [len(names) for names in groups]:
            raise CheckpointError(
                f"load_state_dict(): the state has {lengths} parameters in its groups, and this optimizer, over all "
                f"stages, {[len(names) for names in groups]}. It was saved from another model."
            )
        found = {
            name: place
            for names, places in zip(groups, saved, strict=True)
            for name, place in zip(names, places, strict=True)
        }
        return [found[name] for name in self._tensors.names]

    def whole(self, state: dict[str, Any], keep: bool) -> dict[str, Any]:
        """Returns the whole state that the optimizer's own ``state`` is a part of; a collective call."""
        state = {name: value for name, value in state.items() if name != PART}
        if not self.is_part and self._tensors.partitioned is None:
            found: dict[str, Any] = whole_state(state, keep)
            return found if keep else {}
        extras = {name: value for name, value in state.items() if name not in ("state", "param_groups")}
        # Tensors beside the state are sums of an open window, on each worker those of its own batches: no whole exists.
        if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(extras)) and self.is_part:
            raise CheckpointError(
                "optimizer.full_state_dict(): gradients of several batches are being added up, each worker its own. "
                "Save after the update, or use fleet.elastic.Checkpoint."
            )
        if named := [key for key in state["state"] if not isinstance(key, int)]:
            raise CheckpointError(
                f"optimizer.full_state_dict(): the optimizer keeps {named[:4]!r} for no parameter, and how those of "
                "several workers make a whole is unknown. Save local_state_dict() on each worker."
            )
        groups, entries = self._gathered(state, keep)
        extras = whole_state(extras, keep)
        return {**extras, "state": entries, "param_groups": groups} if keep else {}

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _held(self) -> list[Layout]:
        return [layout for p in self._tensors.parameters if (layout := layout_of(p)) is not None]

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = None if self._tensors.partitioned is None else self._tensors.partitioned.place
        divided = [p for p in map(rows_of, self._tensors.parameters) if is_part(p)]
        if divided and not has_parts(state["state"]):
            inner = place_of(divided[0])
        check_place(state[PART], self._mesh.place(self._held(), inner) or _NO_STATE)
        found = {name: value for name, value in state.items() if name != PART}
        return found if inner is None else {**found, PART: inner}

    # ---- the whole --------------------------------------------------------------------------------------------------

    def _own_groups(self) -> list[list[str]]:
        """Returns the names in each group. Raises CheckpointError where a place in the whole model is unknown."""
        unnamed = [place for place, name in enumerate(self._tensors.names) if name.startswith("#")]
        if unnamed and self._mesh.has_stages:
            raise CheckpointError(
                f"Parameter {unnamed[0]} of the optimizer is in no model that fleet.distributed_model() returned, so "
                "its place in the whole model is unknown. Call distributed_model() first."
            )
        return self._tensors.group_names()

    def _groups(self, posts: Sequence[Mapping[str, Any]] | None = None) -> list[list[str]]:
        """Returns the names in each group of the whole optimizer; a collective call unless all stages have posted."""
        if posts is None:
            group = self._mesh.copy_group()
            entries = self._own_groups()
            posts = group.post({"stage": self._mesh.stage, "entries": entries, "groups": entries})
            posts = self._mesh.by_stage(posts, group.ranks)
        stages = [post["groups"] for post in posts]
        if len({len(groups) for groups in stages}) > 1:
            raise CheckpointError(
                f"The stages of the pipeline have {[len(groups) for groups in stages]} parameter groups. Create the "
                "same groups on every stage, empty ones too, so that a whole state has one place for each parameter."
            )
        return [self._mesh.in_order(lists) for lists in zip(*stages, strict=True)]

    def _gathered(self, state: Mapping[str, Any], keep: bool) -> tuple[list[Any], dict[int, dict[str, Any]]]:
        """Returns the groups and the entries of the whole state; a collective call."""
        partitioned = self._tensors.partitioned
        group = self._mesh.copy_group(
            shards_in(map(rows_of, self._tensors.parameters)) if partitioned is None else partitioned.group
        )
        entries = list(self._tensors.entries(state))
        items = {
            full: self._tensors.item(full, value, at) for at, _, full, value in entries if isinstance(value, Tensor)
        }
        travels = self._mesh.has_stages or partitioned is not None
        posted = {
            "stage": self._mesh.stage,
            "groups": self._own_groups(),
            "entries": [described(full, value, items.get(full), travels) for _, _, full, value in entries],
            "of": [[self._tensors.names[place], key] for place, key, _, _ in entries],
            "boxes": boxes_of(items.values()),
        }
        posts = group.post({**posted, "keep": keep})
        groups = self._groups(self._mesh.by_stage(posts, group.ranks))
        places = {name: at for at, name in enumerate(name for names in groups for name in names)}
        # Every worker has all posts, so all find the same order of entries without another exchange.
        rows: dict[str, tuple[int, str, Any]] = {}  # by name: place, key, entry
        for post in posts:
            for entry, (name, key) in zip(post["entries"], post["of"], strict=True):
                rows.setdefault(entry[0], (places[name], key, entry))
        order = sorted(rows, key=lambda full: rows[full][0])
        own = {full: value for _, _, full, value in entries if full not in items} if partitioned is None else {}
        found: dict[int, dict[str, Any]] = {}
        for full, value in zip(order, group.gather([rows[full][2] for full in order], items, posts), strict=True):
            place, key, _ = rows[full]
            found.setdefault(place, {})[key] = own.get(full, value)
        return self._whole_groups(state, groups, places), found

    def _whole_groups(
        self, state: Mapping[str, Any], groups: Sequence[Sequence[str]], places: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        if not self._mesh.has_stages:
            return list(state["param_groups"])
        found = []
        for group, names in zip(state["param_groups"], groups, strict=True):
            named = {"param_names": list(names)} if "param_names" in group else {}
            found.append({**group, "params": [places[name] for name in names], **named})
        return found


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
