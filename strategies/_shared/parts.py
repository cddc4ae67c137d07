"""Whole states and parts of them: state_dict and load_state_dict of tensors that workers share by parts.

A part is a DTensor of torch. Three forms of a state exist: with DTensors, as ``state_dict()`` returns it; whole, made
of plain tensors, which a plain model or optimizer loads; and local, made of this worker's parts as plain tensors
beside an entry that says whose they are.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fleet.errors import CheckpointError, OptionWarning
from fleet.strategies._shared.through_host import full_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PART = "fleet_part"  # the entry of a local state that says which part it is


def is_part(value: object) -> TypeGuard[DTensor]:
    """Returns whether ``value`` is a DTensor; without importing torch's module, which is slow, none can exist."""
    # A job without DTensors must not pay for the import.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def chunk_of(length: int, rank: int, degree: int) -> slice:
    """Returns a worker's chunk of a dimension that is divided over ``degree`` workers: torch rounds the size up."""
    size = -(-length // degree)
    begin = min(rank * size, length)
    return slice(begin, min(begin + size, length))


def mark_gathered(parameter: nn.Parameter, part: nn.Parameter) -> None:
    """Marks ``parameter`` as gathered from ``part``."""
    parameter.__dict__["fleet_part"] = part


def part_of(parameter: nn.Parameter) -> nn.Parameter:
    """Returns the part that ``parameter`` was gathered from, or ``parameter``."""
    part: nn.Parameter = parameter.__dict__.get("fleet_part", parameter)
    return part


class _Rows:
    """Holds the rows of a parameter; copies and pickles of it hold nothing."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __reduce__(self) -> Any:
        return type(None), ()


def mark_rows(parameter: nn.Parameter, rows: Any) -> None:
    """Marks the DTensor ``rows`` as this worker's rows of the whole ``parameter``; ``None`` removes the mark."""
    parameter.__dict__["fleet_rows"] = None if rows is None else _Rows(rows)


def rows_of(parameter: Any) -> Any:
    """Returns the rows of a whole parameter that this worker updates in stage 2, a DTensor, or ``parameter``."""
    found = getattr(parameter, "__dict__", {}).get("fleet_rows")
    return parameter if found is None else found.rows


def shards_in(tensors: Iterable[Any]) -> Any:
    """Returns the process group over which the first DTensor among ``tensors`` is divided; ``None`` without one."""
    part = next((tensor for tensor in tensors if is_part(tensor)), None)
    return None if part is None else part.device_mesh.get_group(part.device_mesh.ndim - 1)


def has_parts(state: Any) -> bool:
    """Returns whether ``state`` holds a DTensor."""
    return any(is_part(leaf) for leaf in tree_leaves(state))


def mark_part(state: dict[str, Any], place: Mapping[str, int]) -> None:
    """Marks ``state``, an OrderedDict, as the part ``place``; the mark stays in copies and in files of torch."""
    if hasattr(state, "__dict__"):
        state.__dict__[PART] = dict(place)


def marked_part(state: Any) -> dict[str, int] | None:
    """Returns which part a mark says that ``state``, or the first marked state inside it, is."""
    if isinstance(state, Mapping):
        found = getattr(state, PART, None)
        return found if found is not None else next((p for v in state.values() if (p := marked_part(v))), None)
    if isinstance(state, list | tuple):
        return next((p for value in state if (p := marked_part(value))), None)
    return None


def local(tensor: Tensor) -> Tensor:
    """Returns this worker's part of ``tensor``, sharing its memory; a plain tensor is its own part."""
    return tensor.to_local() if is_part(tensor) else tensor


def whole_state(state: Any, keep: bool = True) -> Any:
    """Returns ``state`` with every DTensor gathered, on the host; a collective call.

    Args:
        state: dictionaries and lists with tensors; the same structure on every worker.
        keep: False lets this worker take part and keep nothing.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        full = full_tensor(tensor) if is_part(tensor) else tensor
        return full.detach().to("cpu", copy=True) if keep else None

    return tree_map_only(Tensor, gather, state)


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``state`` on the host with this worker's part for every DTensor, and whose part it is."""
    parts = [leaf for leaf in tree_leaves(state) if is_part(leaf)]
    made: dict[str, Any] = tree_map_only(Tensor, lambda t: local(t).detach().to("cpu", copy=True), state)
    return {**made, PART: place_of(parts[0])} if parts else made


def place_of(tensor: DTensor) -> dict[str, int]:
    """Returns which of how many parts this worker holds: ``{"rank": 0, "degree": 2}``."""
    rank, degree = 0, 1
    coordinate: Any = tensor.device_mesh.get_coordinate()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            size = tensor.device_mesh.size(dim)
            rank = rank * size + coordinate[dim]
            degree *= size
    return {"rank": rank, "degree": degree}


def check_place(saved: Mapping[str, int], mine: Mapping[str, int]) -> None:
    """Raises CheckpointError unless the part ``saved`` is this worker's, ``mine``."""
    if dict(saved) != dict(mine):
        raise CheckpointError(
            f"This state is part {_placed(saved)} of a sharded state, and this worker holds part {_placed(mine)}. Load "
            "the part that this worker saved, or a whole state, which full_state_dict() returns and which fits any "
            "number of workers."
        )


def _placed(place: Mapping[str, int]) -> str:
    axes = ", ".join(f"{axis} {size}" for axis, size in place.items() if axis not in ("rank", "degree"))
    return f"{place['rank']} of {place['degree']}{f' ({axes})' if axes else ''}"


def part_like(value: Any, like: Any, saved: Mapping[str, int] | None = None) -> Any:
    """Returns ``value`` laid out as ``like`` is.

    Args:
        value: a whole tensor, a part, a DTensor, or something that is no tensor.
        like: a DTensor whose layout counts; with anything else ``value`` is returned as it is.
        saved: for a local state, whose part it is; ``None`` for a whole one.

    Raises:
        CheckpointError: the part belongs to another worker.
    """
    if not is_part(like) or not isinstance(value, Tensor) or is_part(value):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if saved is not None:
        check_place(saved, place_of(like))
        if value.shape != like.to_local().shape:
            raise CheckpointError(
                f"A part of shape {tuple(value.shape)} does not fit this worker's part of shape "
                f"{tuple(like.to_local().shape)}. It was saved from another model."
            )
        return DTensor.from_local(
            value.to(like.to_local().device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
            stride=like.stride(),
        )  # fmt: skip
    if value.shape != like.shape:
        return value  # the error of load_state_dict names the entry
    # src_data_rank=None: every worker cuts its part out of its own copy, and nothing is sent.
    return distribute_tensor(value.to(like.to_local().device), like.device_mesh, like.placements, src_data_rank=None)


def warn_of_parts(what: str) -> None:
    """Warns that a state is one worker's part of a ``what``; the warning points at the caller's caller."""
    warnings.warn(
        f"sharding: {what}.state_dict() holds this worker's part. To save the whole state, call "
        f"{what}.full_state_dict() on every worker and write what it returns on one; to save parts, write "
        f"{what}.local_state_dict() on every worker, each to a file of its own.",
        OptionWarning,
        stacklevel=3,
    )


def optimizer_state_like(state: Mapping[str, Any], parameters: Iterable[Tensor]) -> dict[str, Any]:
    """Returns an optimizer's ``state``, whole or local, laid out as ``parameters``, which are in the groups' order."""
    saved = state.get(PART)
    places = [place for group in state["param_groups"] for place in group["params"]]
    owners = dict(zip(places, parameters, strict=False))

    def laid_out(place: Any, entry: Any) -> Any:
        like = owners.get(place)
        if not is_part(like) or not isinstance(entry, Mapping):
            return entry
        shape = like.to_local().shape if saved is not None else like.shape
        return {
            key: part_like(value, like, saved) if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in entry.items()
        }

    entries = {place: laid_out(place, entry) for place, entry in state["state"].items()}
    return {**{name: value for name, value in state.items() if name != PART}, "state": entries}


@torch.no_grad()
def sums_over_parts(values: Tensor, owners: Sequence[Any]) -> Tensor:
    """Returns ``values``, one number for each of ``owners``, summed over the workers that share that owner by parts."""
    meshes: dict[Any, list[int]] = {}
    for place, owner in enumerate(owners):
        if is_part(owner):
            dims = tuple(dim for dim, placement in enumerate(owner.placements) if placement.is_shard())
            meshes.setdefault((owner.device_mesh, dims), []).append(place)
    for (mesh, dims), places in meshes.items():
        index = torch.tensor(places, device=values.device)
        part = values[index]
        for dim in dims:
            dist.all_reduce(part, group=mesh.get_group(dim))
        values = values.index_copy(0, index, part)
    return values
