"""OptimizerStates: the states of an optimizer on its mesh: whole, this worker's part, and loading of both.

[Note: Places]
An optimizer's state names a parameter by its place in the parameter groups. In a whole state that is the place in one
process: with a pipeline each group holds the parameters of all stages, in the order of the layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleet.checkpoint.optimizer_tensors import OptimizerTensors
from fleet.checkpoint.to_group import StateMesh, boxes_of, described
from fleet.errors import CheckpointError
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parameter_layout import Layout, cut, layout_of
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

_NO_STATE = {"rank": 0, "degree": 1}


class OptimizerStates:
    """Takes and loads the states of ``optimizer``.

    Args:
        optimizer: the distributed optimizer; its own ``state_dict`` is not called.
        mesh: the place of this worker.
        models: the wrapped models, whose names the parameters have.
    """

    def __init__(self, optimizer: OptimizerWrapper, mesh: StateMesh, models: Sequence[nn.Module]) -> None:
        self._optimizer, self._mesh = optimizer, mesh
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
        """Returns whether a whole state is made of what several workers hold."""
        return self.is_part or self._tensors.partitioned is not None or has_parts(state)

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
        for place, saved in enumerate(self._saved_places(state)):
            entry = state["state"].get(saved)
            if entry is not None:
                layout = layout_of(self._tensors.parameters[place])
                entries[place] = {k: cut(v, layout) if isinstance(v, Tensor) else v for k, v in entry.items()}
        places = count()
        groups = zip(state["param_groups"], self._tensors.group_names(), strict=True)
        kept = [{**group, "params": [next(places) for _ in own]} for group, own in groups]
        return {**state, "state": entries, "param_groups": kept}

    def _saved_places(self, state: Mapping[str, Any]) -> list[Any]:
        """Returns for each place in this optimizer that in ``state``; with a pipeline a collective call."""
        saved = [list(group["params"]) for group in state["param_groups"]]
        own = self._own_groups()
        groups = self._groups() if self._mesh.has_stages else own
        lengths = [len(places) for places in saved]
        if lengths == [len(names) for names in own] != [len(names) for names in groups]:
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
        return [found[name] for name in self._tensors.names]

    def whole(self, state: dict[str, Any], keep: bool) -> dict[str, Any]:
        """Returns the whole state that the optimizer's own ``state`` is a part of; a collective call."""
        state = {name: value for name, value in state.items() if name != PART}
        if not self.is_part and self._tensors.partitioned is None:
            found: dict[str, Any] = whole_state(state, keep)
            return found if keep else {}
        extras = {name: value for name, value in state.items() if name not in ("state", "param_groups")}
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
        divided = [p for p in self._tensors.parameters if is_part(p)]
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
        partitioned, names = self._tensors.partitioned, self._tensors.names
        group = self._mesh.copy_group(shards_in(self._tensors.parameters) if partitioned is None else partitioned.group)
        entries = list(self._tensors.entries(state))
        items = {
            full: self._tensors.item(full, value, at) for at, _, full, value in entries if isinstance(value, Tensor)
        }
        travels = self._mesh.has_stages or partitioned is not None
        posted = {
            "stage": self._mesh.stage,
            "groups": self._own_groups(),
            "entries": [described(full, value, items.get(full), travels) for _, _, full, value in entries],
            "of": [[names[place], key] for place, key, _, _ in entries],
            "boxes": boxes_of(items.values()),
        }
        posts = group.post({**posted, "keep": keep})
        groups = self._groups(self._mesh.by_stage(posts, group.ranks))
        places = {name: at for at, name in enumerate(name for names in groups for name in names)}
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
