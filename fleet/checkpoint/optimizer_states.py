"""OptimizerStates: the states of an optimizer on its mesh: whole, this worker's part, and loading of both.

[Note: Places]
An optimizer's state names a parameter by its place in the parameter groups. In a whole state that is the place in one
process: with a pipeline each group holds the parameters of all stages, in the order of the layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fleet.checkpoint.boxes import held_boxes, whole_shape
from fleet.checkpoint.items import Item
from fleet.checkpoint.to_group import VALUE, StateMesh, boxes_of, described
from fleet.errors import CheckpointError
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, wrapper_in
from fleet.strategies._shared.parameter_layout import Layout, cut, layout_of, layouts_of
from fleet.strategies._shared.parts import (
    PART,
    check_place,
    has_parts,
    is_part,
    local_state,
    mark_part,
    place_of,
    shards_in,
    whole_state,
)
from fleet.strategies.sharding.owners import PartitionedOptimizer
from fleet.training.fleet_model import FleetModel

_NO_STATE = {"rank": 0, "degree": 1}


class OptimizerStates:
    """Takes and loads the states of ``optimizer``.

    Args:
        optimizer: the distributed optimizer; its own ``state_dict`` is not called.
        mesh: the place of this worker.
        models: the wrapped models, whose names the parameters have.
    """

    def __init__(self, optimizer: OptimizerWrapper, mesh: StateMesh, models: Sequence[FleetModel]) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._parameters = optimizer.parameters()
        self._names, self._layouts = _named(models)
        for parameter in self._parameters:
            layout = layout_of(parameter)
            if layout is not None and layout.parts > 1:
                self._layouts.setdefault(parameter, layout)
        self._partitioned = wrapper_in(optimizer, PartitionedOptimizer)

    @property
    def is_part(self) -> bool:
        """Whether the optimizer updates only a part of the model, apart from what sharding divides."""
        return self._mesh.is_divided(self._held())

    def is_collective(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a whole state is made of what several workers hold."""
        return self.is_part or self._partitioned is not None or has_parts(state)

    def is_collective_load(self, state: Mapping[str, Any]) -> bool:
        """Returns whether loading ``state`` needs the other stages."""
        return self._mesh.has_stages and PART not in state

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's own ``state``, with an entry and a mark that say whose part it is."""
        place = self._mesh.place(self._held(), state.get(PART))
        if place is None or not self.is_part:
            return state
        found: dict[str, Any] = OrderedDict({**state, PART: place})
        mark_part(found, place)
        return found

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns this worker's part on the host, and whose it is."""
        found = local_state(state)
        place = self._mesh.place(self._held(), found.get(PART))
        return found if place is None else {**found, PART: place}

    def loaded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the optimizer itself loads of ``state``, whole or a part; with a pipeline a collective call.

        Raises CheckpointError for the part of another worker, or a state of another model.
        """
        if PART in state:
            return self._own_part(state)
        if not self.is_part:
            return dict(state)
        entries = {}
        for place, saved in self._saved_places(state).items():
            entry = state["state"].get(saved)
            if entry is not None:
                layout = self._layouts.get(self._parameters[place])
                entries[place] = {k: cut(v, layout) if isinstance(v, Tensor) else v for k, v in entry.items()}
        groups = zip(state["param_groups"], self._places(), strict=True)
        kept = [{**group, "params": own["params"]} for group, own in groups]
        return {**state, "state": entries, "param_groups": kept}

    def _saved_places(self, state: Mapping[str, Any]) -> dict[int, Any]:
        """Returns for each place in this optimizer that in ``state``; with a pipeline a collective call."""
        saved = [list(group["params"]) for group in state["param_groups"]]
        mine = [list(group["params"]) for group in self._places()]
        own = [[self._name(place) for place in places] for places in mine]
        groups = self._groups() if self._mesh.has_stages else own
        lengths = [len(places) for places in saved]
        if lengths == [len(places) for places in mine] != [len(names) for names in groups]:
            groups = own  # its own part, without a mark
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
        return {place: found[self._name(place)] for place in range(len(self._parameters))}

    def whole(self, state: dict[str, Any], keep: bool) -> dict[str, Any]:
        """Returns the whole state that the optimizer's own ``state`` is a part of; a collective call."""
        state = {name: value for name, value in state.items() if name != PART}
        if not self.is_part and self._partitioned is None:
            found: dict[str, Any] = whole_state(state, keep)
            return found if keep else {}
        extras = {name: value for name, value in state.items() if name not in ("state", "param_groups")}
        if any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(extras)) and self.is_part:
            raise CheckpointError(
                "optimizer.full_state_dict(): gradients of several batches are being added up, each worker its own. "
                "Save after the update, or use fleet.elastic.Checkpoint."
            )
        groups, entries = self._gathered(state, keep)
        extras = whole_state(extras, keep)
        return {**extras, "state": entries, "param_groups": groups} if keep else {}

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterable[Layout]:
        return [self._layouts[p] for p in self._parameters if p in self._layouts]

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = None if self._partitioned is None else self._partitioned.place
        divided = [p for p in self._parameters if is_part(p)]
        if divided and not has_parts(state["state"]):
            inner = place_of(divided[0])
        check_place(state[PART], self._mesh.place(self._held(), inner) or _NO_STATE)
        found = {name: value for name, value in state.items() if name != PART}
        return found if inner is None else {**found, PART: inner}

    def _places(self) -> Iterator[dict[str, Any]]:
        """Yields the parameter groups with places for parameters."""
        place = 0
        for group in self._optimizer.param_groups:
            count = len(group["params"])
            yield {**group, "params": list(range(place, place + count))}
            place += count

    # ---- the whole --------------------------------------------------------------------------------------------------

    def _name(self, place: int) -> str:
        """Returns the name of a parameter; without stages its place is one."""
        if not self._mesh.has_stages:
            return str(place)
        name = self._names.get(self._parameters[place])
        if name is None:
            raise CheckpointError(
                f"Parameter {place} of the optimizer is in no model that fleet.distributed_model() returned, so its "
                "place in the whole model is unknown. Call distributed_model() first."
            )
        return name

    def _own_groups(self) -> list[list[str]]:
        return [[self._name(place) for place in group["params"]] for group in self._places()]

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
        partitioned = self._partitioned
        group = self._mesh.copy_group(shards_in(self._parameters) if partitioned is None else partitioned.group)
        own, items = self._described(state)
        posts = group.post({**self._posted(own, items), "keep": keep})
        groups = self._groups(self._mesh.by_stage(posts, group.ranks))
        places = {name: at for at, name in enumerate(name for names in groups for name in names)}
        rows: dict[str, tuple[int, str, Any]] = {}  # by name: place, key, entry
        for post in posts:
            for entry, (name, key) in zip(post["entries"], post["of"], strict=True):
                rows.setdefault(entry[0], (places[name], key, entry))
        order = sorted(rows, key=lambda full: rows[full][0])
        found: dict[int, dict[str, Any]] = {}
        for full, value in zip(order, group.gather([rows[full][2] for full in order], items, posts), strict=True):
            place, key, entry = rows[full]
            is_own = entry[1] == VALUE and full in own and self._partitioned is None
            found.setdefault(place, {})[key] = own[full][2] if is_own else value
        return self._whole_groups(state, groups, places), found

    def _described(self, state: Mapping[str, Any]) -> tuple[dict[str, tuple[str, str, Any]], dict[str, Item]]:
        """Returns by name the parameter, key and value of each entry of ``state``, and its tensors."""
        own: dict[str, tuple[str, str, Any]] = {}
        items: dict[str, Item] = {}
        for place, entry in sorted(state["state"].items()):
            for key, value in entry.items():
                full = f"{self._name(place)}/{key}"
                own[full] = (self._name(place), key, value)
                if isinstance(value, Tensor):
                    items[full] = self._item(full, value, key, self._parameters[place])
        return own, items

    def _posted(self, own: Mapping[str, tuple[str, str, Any]], items: Mapping[str, Item]) -> dict[str, Any]:
        travels = self._mesh.has_stages or self._partitioned is not None
        return {
            "stage": self._mesh.stage,
            "groups": self._own_groups(),
            "entries": [described(full, value, items.get(full), travels) for full, (_, _, value) in own.items()],
            "of": [[name, key] for name, key, _ in own.values()],
            "boxes": boxes_of(items.values()),
        }

    def _item(self, full: str, value: Tensor, key: str, parameter: Tensor) -> Item:
        layout = self._layouts.get(parameter)
        if layout is not None and value.dim() and tuple(value.shape) != layout.shape:
            raise CheckpointError(
                f"full_state_dict(): the optimizer keeps {key!r} of shape {list(value.shape)} for a part of shape "
                f"{list(layout.shape)}, and how such parts make a whole is unknown. Save local_state_dict() on each "
                "worker."
            )
        layout = layout if value.dim() else None
        return Item(full, whole_shape(value, layout), held_boxes(value, layout), ())

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


def _named(models: Sequence[FleetModel]) -> tuple[dict[Tensor, str], dict[Tensor, Layout]]:
    """Returns the name of every parameter, different for every model, and the layouts of those that are divided."""
    names: dict[Tensor, str] = {}
    layouts: dict[Tensor, Layout] = {}
    for number, model in enumerate(models):
        divided = layouts_of(model.module)
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, f"{name}@{number}" if number else name)
            if name in divided:
                layouts.setdefault(parameter, divided[name])
    return names, layouts
