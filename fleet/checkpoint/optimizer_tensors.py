"""The state of an optimizer in a checkpoint: by the names of its parameters, whatever the mesh.

[Note: Names of an optimizer's state]
``KEY/weight/exp_avg`` is the state ``exp_avg`` of the parameter ``weight`` of a module that is saved or wrapped beside
the optimizer; state other than tensors stands in the values under the same names. The parameter groups are the value
``KEY/groups@STAGE``: their settings, and the names of their parameters on that stage of a pipeline, or on the workers
with the same experts. Additions of a strategy to the state (the loss scale of amp) are the value ``KEY/+NAME``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.checkpoint.boxes import HeldBox, held_boxes, holders_of, whole_shape
from fleet.checkpoint.index import merged_groups
from fleet.checkpoint.items import Item, StateSource, Wanted
from fleet.checkpoint.state_adapter import Description, StateAdapter
from fleet.checkpoint.values import decode, encode
from fleet.errors import CheckpointError
from fleet.job.axes import Axes
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, wrapper_in
from fleet.strategies._shared.parameter_layout import layout_of
from fleet.strategies._shared.parts import PART, is_part, local, rows_of
from fleet.strategies.sharding.owners import PartitionedOptimizer

_NAMED = "#state"  # the value for entries of the state that belong to no parameter


class OptimizerTensors(StateAdapter):
    """Describes and loads the state of one optimizer.

    Args:
        key: its name in the checkpoint.
        optimizer: a plain or a distributed one.
        names: the names of the parameters.
        axes: the place of this worker.
        own: this worker's rank where every worker saves its state separately; ``None`` elsewhere.
        homes: the key of each parameter's module (empty if that is not among the objects), and its name there.

    Attributes:
        parameters: in the order of the groups.
        names: the names of the parameters; a parameter in no module gets a name that begins with ``#``.
        partitioned: the wrapper inside, where each worker of a sharding group keeps the state of some parameters.
    """

    kind = "optimizer"

    def __init__(
        self, key: str, optimizer: Optimizer, names: Mapping[Tensor, str], axes: Axes, own: int | None = None,
        homes: Mapping[Tensor, tuple[str, str]] | None = None,
    ) -> None:  # fmt: skip
        self.key = key
        self.optimizer = optimizer
        self._axes = axes
        self._own = own
        self._prefix = key if own is None else f"@{own}/{key}"
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                self.parameters.append(parameter)
                self.names.append(names.get(parameter) or f"#{number}.{place}")
        self._homes = [(homes or {}).get(parameter, ("", "")) for parameter in self.parameters]
        self.partitioned = wrapper_in(optimizer, PartitionedOptimizer)
        self.class_name = type(getattr(optimizer, "user_optimizer", optimizer)).__name__
        self._entries: dict[int, dict[str, Any]] = {}  # what put() gives the optimizer

    def _state(self) -> dict[str, Any]:
        """Returns the state as this worker has it."""
        # Not FleetOptimizer.state_dict(), which warns of parts and marks them.
        if isinstance(self.optimizer, OptimizerWrapper):
            return OptimizerWrapper.state_dict(self.optimizer)
        return self.optimizer.state_dict()

    def describe(self) -> Description:
        """Returns the state."""
        state = self._state()
        items: list[Item] = []
        values: dict[str, Any] = {}
        for place, _, full, value in self.entries(state):
            if isinstance(value, Tensor):
                items.append(self.item(full, value, place))
            else:
                values[full] = self._encoded(full, value, items, self.parameters[place])
        # Groups list their parameters by name, and along these axes the workers have parameters of other names.
        along = ("pp", "ep") if self._axes.experts else ("pp",)
        stage = 0 if self._own is not None else self._axes.rank(*along)
        values[f"{self._prefix}/groups@{stage}"] = self._groups(state, items)
        if named := {key: value for key, value in state["state"].items() if not isinstance(key, int)}:
            values[f"{self._prefix}/{_NAMED}"] = self._encoded(f"{self._prefix}/{_NAMED}", named, items)
        for key, value in state.items():
            if key not in ("state", "param_groups", PART):
                values[f"{self._prefix}/+{key}"] = self._encoded(f"{self._prefix}/+{key}", value, items)
        return Description(items, values=values)

    def entries(self, state: Mapping[str, Any]) -> Iterator[tuple[int, str, str, Any]]:
        """Yields the entries of ``state`` for parameters: place, key, name of the entry, and value."""
        for place, name in enumerate(self.names):
            for key, value in state["state"].get(place, {}).items():
                yield place, key, f"{self._prefix}/{name}/{key}", value

    def group_names(self) -> list[list[str]]:
        """Returns the names of the parameters in each group."""
        names = iter(self.names)
        return [[next(names) for _ in group["params"]] for group in self.optimizer.param_groups]

    def _encoded(self, name: str, value: Any, items: list[Item], parameter: Tensor | None = None) -> Any:
        tensors: dict[str, Tensor] = {}
        found = encode(value, name, tensors)
        items += [self._plain_item(inner, tensor, parameter) for inner, tensor in tensors.items()]
        return found

    def _groups(self, state: dict[str, Any], items: list[Item]) -> list[Any]:
        found = []
        for number, group in enumerate(state["param_groups"]):
            settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            named = [self.names[place] for place in group["params"]]
            at = f"{self._prefix}/groups/{number}"
            shapes = [list(self._whole_shape(self.parameters[place])) for place in group["params"]]
            keys = list(dict.fromkeys(key for place in group["params"] for key in state["state"].get(place, {})))
            encoded = self._encoded(at, settings, items)
            found.append({"params": named, "shapes": shapes, "settings": encoded, "keys": keys})
        return found

    def _whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        is_own = self._own is not None
        return tuple(local(rows_of(parameter)).shape) if is_own else whole_shape(parameter, layout_of(parameter))

    def item(self, name: str, value: Tensor, place: int) -> Item:
        """Returns the tensor ``value``, a part of the state of the parameter at ``place``.

        Raises CheckpointError for a part of another shape than the parameter's.
        """
        if self._own is not None:
            return self._plain_item(name, local(value))
        parameter = self.parameters[place]
        layout = layout_of(parameter)
        is_like = tuple(value.shape) == tuple(parameter.shape)
        if value.dim() and not is_like and layout is not None and layout.parts > 1:
            raise CheckpointError(
                f"The optimizer keeps {name!r} of shape {list(value.shape)} for a part of shape "
                f"{list(layout.shape)}, and how such parts make a whole is unknown. Use an optimizer whose state has "
                "the shape of its parameters, do not divide this layer, or save local_state_dict() on each worker."
            )
        layout = layout if is_like else None
        owned = self.partitioned is not None
        shape = whole_shape(value, layout)
        holders = holders_of(self._axes, value if is_part(value) else parameter, layout, is_expert(parameter), owned)
        return Item(name, shape, held_boxes(value, layout), holders)

    def _plain_item(self, name: str, value: Tensor, parameter: Tensor | None = None) -> Item:
        """Returns an undivided tensor, held by all workers or, with ``parameter``, by its holders."""
        own = local(value).detach()
        holders = self._axes.ranks(*self._axes.degrees)
        if self._own is not None:
            holders = (self._own,)
        elif parameter is not None:
            owned = self.partitioned is not None
            holders = holders_of(self._axes, parameter, layout_of(parameter), is_expert(parameter), owned)
        return Item(name, tuple(own.shape), [HeldBox((0,) * own.dim(), own)], holders, alone=True)

    def check(self, source: StateSource) -> list[str]:
        """Returns why the checkpoint does not fit the optimizer; an empty list where it does. Nothing is changed."""
        saved = saved_groups(source, self._prefix)
        found = []
        # Both replace self.names by the saved names, which everything below, and the load, goes by.
        self._match_by_place(saved)
        self._match_by_module(saved)
        if len(saved) != len(self.optimizer.param_groups):
            return [
                f"{self.key!r}: {len(saved)} parameter groups are in the checkpoint, and the optimizer has "
                f"{len(self.optimizer.param_groups)}"
            ]
        for number, (mine, other) in enumerate(zip(self.group_names(), saved, strict=True)):
            known = set(other["params"])
            missing = [name for name in mine if name not in known]
            # The saved groups are whole; this worker's lack the parameters of other stages and experts.
            elsewhere = self._axes.size("pp") > 1 or bool(self._axes.experts)
            gone = [] if elsewhere else [name for name in other["params"] if name not in set(mine)]
            if missing or gone:
                found.append(
                    f"{self.key!r}: group {number} has {missing[:4]!r}, which the saved one lacks"
                    if missing
                    else f"{self.key!r}: the saved group {number} has {gone[:4]!r}, which this one lacks"
                )
        shapes = {
            name: tuple(shape)
            for group in saved
            for name, shape in zip(group["params"], group["shapes"], strict=True)
            if shape is not None
        }
        for parameter, name in zip(self.parameters, self.names, strict=True):
            whole = self._whole_shape(parameter)
            if shapes.get(name, whole) != whole:
                found.append(f"{self.key!r}: {name!r} is {list(shapes[name])} in the checkpoint and {list(whole)} here")
        return found

    def wanted(self, source: StateSource) -> Wanted:
        """Returns the memory of this worker's state, and new memory where the present state has another form."""
        found = Wanted()
        own = self._state()["state"]
        used: set[int] = set()
        self._entries = {}
        for place, key, full in self._needed(source):
            value = source.index.values.get(full)
            if full in source.index.values:
                found.add_inside(source, value)
            else:
                present = own.get(place, {}).get(key)
                value = self._memory(source, full, self.parameters[place], present, used, found)
            self._entries.setdefault(place, {})[key] = value
        for group in saved_groups(source, self._prefix):
            found.add_inside(source, group["settings"])
        for name, value in source.index.values.items():
            if name.startswith((f"{self._prefix}/+", f"{self._prefix}/{_NAMED}")):
                found.add_inside(source, value)
        return found

    def _needed(self, source: StateSource) -> Iterator[tuple[int, str, str]]:
        """Yields the state that this worker keeps: place of the parameter, key, and name in the checkpoint."""
        groups = saved_groups(source, self._prefix)
        order = list(dict.fromkeys(key for group in groups for key in group["keys"]))
        # Tensors and values of a state lie apart in the index; the groups keep the order that the optimizer gave them.
        for place, name in enumerate(self.names):
            if self.partitioned is None or self.partitioned.owns(self.parameters[place]):
                keys = self._keys(source, name)
                for key in sorted(keys, key=lambda key: order.index(key) if key in order else len(order)):
                    yield place, key, f"{self._prefix}/{name}/{key}"

    def _memory(
        self, source: StateSource, full: str, parameter: Tensor, present: Any, used: set[int], wanted: Wanted
    ) -> Tensor:  # fmt: skip
        """Returns the tensor to fill with the saved tensor ``full``, or with this worker's part of it.

        It has the memory of ``present``, the state that it replaces, where that has its form: a second copy of a large
        state would not fit beside it. ``used`` has the addresses that are wanted so far.
        """
        entry = source.known(full)
        layout = layout_of(parameter)
        parameter = rows_of(parameter)
        dtype = getattr(torch, entry.dtype)
        device = local(parameter).device if entry.shape else torch.device("cpu")
        is_cut = self._own is None and bool(entry.shape) and entry.shape == whole_shape(parameter, layout)
        if not is_cut:
            whole = wanted.add_whole(source, full, device)
            is_own_part = self._own is not None and whole.shape == local(parameter).shape
            return _like(parameter, whole) if is_own_part else whole
        # Two entries that share memory now may differ in the checkpoint, so only the first of them keeps it.
        if _is_like(present, parameter, dtype, device) and local(present).data_ptr() not in used:
            used.add(local(present).data_ptr())
            target = cast(Tensor, present)
        else:
            target = _like(parameter, torch.empty(local(parameter).shape, dtype=dtype, device=device))
        wanted.add(full, held_boxes(target, layout))
        return target

    def put(self, source: StateSource, wanted: Wanted) -> None:
        """Loads the saved state into the optimizer; its tensors are already filled."""
        own = self._state()
        values = source.index.values
        entries: dict[Any, dict[str, Any]] = {}
        for place, key, full in self._needed(source):
            value = self._entries[place][key]
            entries.setdefault(place, {})[key] = decode(value, wanted.tensor) if full in values else value
        self._entries = {}
        if (named := values.get(f"{self._prefix}/{_NAMED}")) is not None:
            entries |= decode(named, wanted.tensor)
        groups = []
        for group, saved in zip(own["param_groups"], saved_groups(source, self._prefix), strict=True):
            settings = decode(saved["settings"], wanted.tensor)
            groups.append({**group, **settings, "params": group["params"]})
        extras = {
            key: decode(values[f"{self._prefix}/+{key}"], wanted.tensor)
            for key in own
            if f"{self._prefix}/+{key}" in values
        }
        # Additions of strategies that the checkpoint lacks stay as they are, such as the loss scale of a first amp run.
        kept = {key: value for key, value in own.items() if key not in ("state", "param_groups", *extras)}
        state = {**kept, **extras, "state": entries, "param_groups": groups}
        if isinstance(self.optimizer, OptimizerWrapper):
            OptimizerWrapper.load_state_dict(self.optimizer, state)
        else:
            self.optimizer.load_state_dict(state)

    def _match_by_place(self, saved: list[dict[str, Any]]) -> None:
        """Adopts the saved names by their order where parameters, here or there, belong to no module."""
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        named = [name for group in saved for name in group["params"]]
        unnamed = any(name.startswith("#") for name in (*named, *self.names))
        if unnamed and sizes == [len(group["params"]) for group in saved]:
            self.names = named

    def _match_by_module(self, saved: list[dict[str, Any]]) -> None:
        """Adopts the saved names of parameters whose name occurs in several modules.

        The first module of a save has the plain names and the others their key before it, and the objects of a load may
        come in another order, or be fewer.
        """
        like: dict[str, list[str]] = {}
        for name in (name for group in saved for name in group["params"]):
            like.setdefault(name.rpartition(":")[2], []).append(name)
        claimed: set[str] = set()
        # Modules among the objects have certain names (their key comes first), so they choose before the others.
        for is_given in (True, False):
            for place, (key, bare) in enumerate(self._homes):
                if not bare or bool(key) != is_given:
                    continue
                exact = f"{key}:{bare}" if is_given else self.names[place]
                free = [name for name in like.get(bare, ()) if name not in claimed]
                if exact not in free and is_given:
                    free = [name for name in free if name == bare]
                if exact in free:
                    self.names[place] = exact
                elif len(free) == 1:
                    self.names[place] = free[0]
                claimed.add(self.names[place])

    def _keys(self, source: StateSource, name: str) -> list[str]:
        """Returns the names of the saved state of the parameter ``name``, in order."""
        return source.below(f"{self._prefix}/{name}")


def _like(parameter: Tensor, own: Tensor) -> Tensor:
    """Returns ``own``, numbers of this worker, laid out as ``parameter`` is."""
    if not is_part(parameter):
        return own
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def _is_like(present: Any, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether ``present`` is a tensor laid out as ``parameter``, with writable memory for its numbers."""
    if not isinstance(present, Tensor) or is_part(present) != is_part(parameter):
        return False
    if is_part(present) and getattr(present, "placements", ()) != getattr(parameter, "placements", ()):
        return False
    own = local(present)
    is_alike = own.shape == local(parameter).shape and (own.dtype, own.device) == (dtype, device)
    return is_alike and own.numel() > 0 and own.is_contiguous() and not own.is_inference()


def saved_groups(source: StateSource, key: str) -> list[dict[str, Any]]:
    """Returns the saved parameter groups of the optimizer ``key``, each with the names of all stages."""
    begin = f"{key}/groups@"
    stages = [name for name in source.index.values if name.startswith(begin)]
    stages.sort(key=lambda name: int(name.removeprefix(begin)))
    return merged_groups(source.index.values[name] for name in stages)
