"""OptimizerStates: the states of an optimizer on its mesh: whole, this worker's part, and loading of both.

[Note: Places]
An optimizer's state names a parameter by its place in the parameter groups. In a whole state that is the place in one
process: with a pipeline each group holds the parameters of all stages, in the order of the layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fleet.errors import CheckpointError
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parameter_layout import Layout, layout_of
from fleet.strategies._shared.parts import (
    PART,
    check_place,
    has_parts,
    is_part,
    local_state,
    mark_part,
    place_of,
    whole_state,
)
from fleet.strategies._shared.whole_states import WholeEntry, WholeStates, cut, described, interleaved, layouts_of
from fleet.strategies.sharding.owners import PartitionedOptimizer
from fleet.training.fleet_model import FleetModel

_NO_STATE = {"rank": 0, "degree": 1}


class OptimizerStates:
    """Takes and loads the states of ``optimizer``.

    Args:
        optimizer: the distributed optimizer; its own ``state_dict`` is not called.
        whole: joins and cuts on this mesh.
        models: the wrapped models, whose names the parameters have.
    """

    def __init__(self, optimizer: OptimizerWrapper, whole: WholeStates, models: Sequence[FleetModel]) -> None:
        self._optimizer, self._whole = optimizer, whole
        self._parameters = optimizer.parameters()
        self._names, self._layouts = _named(models)
        for parameter in self._parameters:
            layout = layout_of(parameter)
            if layout is not None and layout.parts > 1:
                self._layouts.setdefault(parameter, layout)
        self._partitioned = _partitioned_in(optimizer)

    @property
    def is_part(self) -> bool:
        """Whether the optimizer updates only a part of the model, apart from what sharding divides."""
        return self._whole.is_divided(self._held())

    def is_collective(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a whole state is made of what several workers hold."""
        return self.is_part or self._partitioned is not None or has_parts(state)

    def is_collective_load(self, state: Mapping[str, Any]) -> bool:
        """Returns whether loading ``state`` needs the other stages."""
        return self._whole.has_stages and PART not in state

    def marked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's own ``state``, with an entry and a mark that say whose part it is."""
        place = self._whole.place(self._held(), state.get(PART))
        if place is None or not self.is_part:
            return state
        found: dict[str, Any] = OrderedDict({**state, PART: place})
        mark_part(found, place)
        return found

    def local(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns this worker's part on the host, and whose it is."""
        found = local_state(state)
        place = self._whole.place(self._held(), found.get(PART))
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

    def held(self, state: Mapping[str, Any]) -> dict[Any, Layout | None]:
        """Returns the places in the whole ``state`` of what this worker updates; with a pipeline a collective call."""
        found = self._saved_places(state)
        return {saved: self._layouts.get(self._parameters[place]) for place, saved in found.items()}

    def _saved_places(self, state: Mapping[str, Any]) -> dict[int, Any]:
        """Returns for each place in this optimizer that in ``state``; with a pipeline a collective call."""
        saved = [list(group["params"]) for group in state["param_groups"]]
        mine = [list(group["params"]) for group in self._places()]
        own = [[self._name(place) for place in places] for places in mine]
        groups = self._groups() if self._whole.has_stages else own
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
        extras = whole_state(extras, keep)
        groups, entries = self._gathered(state, keep)
        return {**extras, "state": entries, "param_groups": groups} if keep else {}

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterable[Layout]:
        return [self._layouts[p] for p in self._parameters if p in self._layouts]

    def _own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = None if self._partitioned is None else self._partitioned.place
        divided = [p for p in self._parameters if is_part(p)]
        if divided and not has_parts(state["state"]):
            inner = place_of(divided[0])
        check_place(state[PART], self._whole.place(self._held(), inner) or _NO_STATE)
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
        if not self._whole.has_stages:
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

    def _groups(self, said: Sequence[Sequence[Sequence[str]]] | None = None) -> list[list[str]]:
        """Returns the names in each group of the whole optimizer; a collective call unless all stages have ``said``."""
        said = self._whole.said(self._own_groups()) if said is None else said
        if len({len(groups) for groups in said}) > 1:
            raise CheckpointError(
                f"The stages of the pipeline have {[len(groups) for groups in said]} parameter groups. Create the same "
                "groups on every stage, empty ones too, so that a whole state has one place for each parameter."
            )
        return [self._whole.in_order(interleaved(stages)) for stages in zip(*said, strict=True)]

    def _rows(self, state: Mapping[str, Any]) -> list[list[Any]]:
        """Returns [owner, place, key, type, shape] of this stage's entries, as the owners' list has them."""
        if self._partitioned is not None:
            return self._partitioned.entry_rows()
        rows = []
        for place, entry in sorted(state["state"].items()):
            for key, value in entry.items():
                _, kind, shape, said = described(key, value, None, self._whole.has_stages)
                rows.append([0, place, key, kind, said if kind == "value" else shape])
        return rows

    def _gathered(self, state: Mapping[str, Any], keep: bool) -> tuple[list[Any], dict[int, dict[str, Any]]]:
        rows = self._rows(state)
        named = [[self._name(row[1]), row[2], row[3], self._whole_shape(row)] for row in rows]
        said = self._whole.said({"groups": self._own_groups(), "rows": named})
        groups = self._groups([stage["groups"] for stage in said])
        places = {name: at for at, name in enumerate(name for names in groups for name in names)}
        union: dict[tuple[int, str], WholeEntry] = {}
        for stage, other in enumerate(said):
            for name, key, kind, shape in other["rows"]:
                is_value = kind == "value"
                entry = WholeEntry(name, stage, kind, () if is_value else tuple(shape), shape if is_value else None)
                union.setdefault((places[name], key), entry)
        mine = {(places[self._name(row[1])], row[2]): row for row in rows}
        order = sorted(union, key=lambda found: found[0])
        taken = {at for at, row in mine.items() if self._takes(union[at], self._parameters[row[1]])}
        wanted = [mine[at] for at in order if at in taken and union[at].kind != "value"]
        tensors = self._tensors(state, wanted)
        entries: dict[int, dict[str, Any]] = {}
        for at in order:
            entry, row = union[at], mine.get(at)
            if entry.kind == "value":
                value = entry.value
                if row is not None and self._partitioned is None:
                    value = state["state"][row[1]][row[2]]
            else:
                own = next(tensors) if at in taken else None
                layout = None if row is None else self._layouts.get(self._parameters[row[1]])
                value = self._whole.gathered(own, entry, layout, keep)
            entries.setdefault(at[0], {})[at[1]] = value
        return self._whole_groups(state, groups, places), entries

    def _takes(self, entry: WholeEntry, parameter: Tensor) -> bool:
        """Returns whether this worker takes part in gathering an entry of one of its parameters."""
        shares = self._partitioned is not None and self._whole.has_experts and not is_expert(parameter)
        return shares or self._whole.joins(entry, True, self._layouts.get(parameter))

    def _tensors(self, state: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> Iterator[Tensor]:
        if self._partitioned is not None:
            yield from self._partitioned.entry_tensors(rows)
            return
        for _, place, key, *_ in rows:
            yield state["state"][place][key]

    def _whole_shape(self, row: Sequence[Any]) -> Any:
        _, place, key, kind, shape = row
        layout = self._layouts.get(self._parameters[place])
        if kind == "value" or layout is None or not shape:
            return shape
        if tuple(shape) == layout.shape:
            return list(layout.whole)
        raise CheckpointError(
            f"full_state_dict(): the optimizer keeps {key!r} of shape {list(shape)} for a part of shape "
            f"{list(layout.shape)}, and how such parts make a whole is unknown. Save local_state_dict() on each worker."
        )

    def _whole_groups(
        self, state: Mapping[str, Any], groups: Sequence[Sequence[str]], places: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        if not self._whole.has_stages:
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


def _partitioned_in(optimizer: torch.optim.Optimizer) -> PartitionedOptimizer | None:
    while isinstance(optimizer, OptimizerWrapper):
        if isinstance(optimizer, PartitionedOptimizer):
            return optimizer
        optimizer = optimizer.optimizer
    return None
