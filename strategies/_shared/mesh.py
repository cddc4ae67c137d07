"""The mesh: which workers are neighbours along which axis, and one process group for each axis."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fleet.job.axes import AXES, Axes
from fleet.strategies._declare.degrees import asked_degrees, plan_degrees, plan_experts


def plan_axes(options: Any, world_size: int) -> dict[str, int]:
    """Returns the degree of every axis, outermost first, of options that a plan was made from.

    ``sharding_configs`` decides when 'sharding' is on, ``hybrid_configs`` otherwise and where the first names no
    sharding_degree; ``hybrid_configs['order']`` or ``hybrid_parallel_order`` gives the order.
    """
    hybrid = options["hybrid_configs"]
    order = [axis for axis in hybrid.order or options["hybrid_parallel_order"] if axis in AXES]
    planned, _ = _planned(options, world_size)
    return {axis: planned[axis] for axis in (*order, *(axis for axis in AXES if axis not in order))}


def plan_expert_axes(options: Any, world_size: int) -> dict[str, int]:
    """Returns the degrees of the expert grid, ``moe_sharding`` and ``ep``; ``{}`` where no expert is divided."""
    return _planned(options, world_size)[1]


def _planned(options: Any, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    return plan_experts(options, plan_degrees(*asked_degrees(options), world_size))


def plan_axis_groups(degrees: Mapping[str, int], axis: str) -> list[list[int]]:
    """Returns the ranks of every group along ``axis``; ``degrees`` are by axis, the outermost first.

    Example:
        >>> plan_axis_groups({"dp": 2, "sharding": 2}, "dp")
        [[0, 2], [1, 3]]
    """
    ranks = torch.arange(prod(degrees.values())).view(list(degrees.values()))
    groups: list[list[int]] = ranks.movedim(list(degrees).index(axis), -1).reshape(-1, degrees[axis]).tolist()
    return groups


def make_mesh(axes: Axes, process_group: dist.ProcessGroup, device_type: str) -> DeviceMesh | None:
    """Returns the mesh of the axes whose degree is above 1, or ``None`` when only dp is.

    It uses the groups of ``axes``; a single axis uses ``process_group`` itself.
    """
    real = {axis: degree for axis, degree in axes.degrees.items() if degree > 1}
    if set(real) <= {"dp"}:
        return None
    if len(real) == 1:
        return DeviceMesh.from_group(process_group, device_type, mesh_dim_names=tuple(real))
    groups: list[Any] = [axes.group(axis) for axis in real]
    ranks = torch.arange(prod(real.values()), dtype=torch.int).view(list(real.values()))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(real))


def sub_mesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Returns the part of ``mesh`` along ``axes``, in that order, through this worker; no group is made."""
    names = mesh.mesh_dim_names or ()
    groups = [mesh.get_group(axis) for axis in axes]
    if len(axes) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=axes)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("this worker is outside the mesh")
    place = tuple(slice(None) if name in axes else at for name, at in zip(names, coordinate, strict=True))
    kept = [name for name in names if name in axes]
    ranks = mesh.mesh[place].permute([kept.index(axis) for axis in axes]).contiguous()
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=axes)


def copies_mesh(mesh: DeviceMesh, axes: Axes) -> DeviceMesh:
    """Returns the mesh of the workers that hold the same part of a model: 'sharding', and its copies before it."""
    others = ("dp", "sep", "cp")
    real = tuple(axis for axis in others if axes.size(axis) > 1)
    if len(real) < 2:
        return sub_mesh(mesh, (*real, "sharding"))
    # A mesh has a group for each dim: several axes of copies become one dim, with the group made for them at the start.
    degree = axes.size("sharding")
    peers = axes.ranks(*others, "sharding")
    columns = [[rank for rank in peers if axes.coordinate(rank)["sharding"] == at] for at in range(degree)]
    ranks = torch.tensor(columns, dtype=torch.int).T.contiguous()
    groups: list[Any] = [axes.group(*others), axes.group("sharding")]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=("copies", "sharding"))
