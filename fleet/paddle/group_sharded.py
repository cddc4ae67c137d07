"""group_sharded_parallel: sharding in one call, without a strategy; and save_group_sharded_model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fleet.checkpoint import save_load
from fleet.errors import CheckpointError, ConfigError, OptionWarning, UnsupportedOptionError
from fleet.job.axes import Axes
from fleet.options import DistributedStrategy
from fleet.strategies._declare.strategy import Strategy
from fleet.strategies.data_parallel import DataParallelJob
from fleet.strategies.sharding.sharding import Sharding
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer
from fleet.training.placement import move_model

if TYPE_CHECKING:
    from fleet.job.session import Session

LEVELS = {"os": 1, "os_g": 2, "p_g_os": 3}
_MIB = 1024 * 1024


def _axes_of(mesh: DeviceMesh, everyone: Any) -> Axes:
    """Returns the place of this worker on ``mesh``; ranks count in the group ``everyone``, not in the job."""
    names = mesh.mesh_dim_names or ()
    axes = Axes(dict(zip(names, mesh.mesh.shape, strict=True)), dist.get_rank(everyone))
    groups = {axes.ranks(*names): everyone, **{axes.ranks(axis): mesh.get_group(axis) for axis in names}}
    return Axes(axes.degrees, axes.global_rank, groups)


def shard_by_groups(
    session: Session,
    model: nn.Module,
    optimizer: Optimizer,
    level: str,
    *,
    group: dist.ProcessGroup | None,
    dp_group: dist.ProcessGroup | None,
    offload: bool,
    buffer_max_size: int,
) -> tuple[FleetModel, FleetOptimizer]:
    """Returns ``model`` and ``optimizer`` sharded over the workers of ``group``; nothing changes when it raises."""
    if isinstance(model, FleetModel) or not isinstance(model, nn.Module):
        raise ConfigError(f"group_sharded_parallel(model=...) takes your torch.nn.Module, got {model!r}.")
    if isinstance(optimizer, FleetOptimizer) or not isinstance(optimizer, Optimizer):
        raise ConfigError(f"group_sharded_parallel(optimizer=...) takes your torch.optim.Optimizer, got {optimizer!r}.")
    others = [step.name for step in session.plan.steps if step.name != "data_parallel"]
    if others:
        raise ConfigError(
            f"group_sharded_parallel() only shards, and {', '.join(others)} is on. Use "
            "strategy.sharding with fleet.distributed_model() and fleet.distributed_optimizer()."
        )
    strategies = _strategies(session, level, group, dp_group, offload, buffer_max_size)
    # All checks come before the first change, so that a refusal leaves model and optimizer as they were.
    for strategy in strategies:
        strategy.check_model(model)
        strategy.check_optimizer(optimizer)
    move_model(model, session.job.device, [optimizer])
    module_chain = model
    optimizer_chain = optimizer
    for strategy in strategies:
        module_chain = strategy.wrap_model(module_chain)
        optimizer_chain = strategy.wrap_optimizer(optimizer_chain)
    wrapped = FleetModel(model, module_chain, session.job)
    session.models.append(wrapped)
    stepped = FleetOptimizer(optimizer_chain, session.job, optimizer)
    session.optimizers.append(stepped)
    return wrapped, stepped


def check_arguments(
    level: object, buffer_max_size: object, segment_size: int, sync_comm: bool, exclude_layer: Sequence[Any] | None
) -> None:
    """Raises for a wrong argument; warns about an argument without effect."""
    if level not in LEVELS:
        raise ConfigError(f"group_sharded_parallel(level={level!r}) takes one of 'os', 'os_g', 'p_g_os'.")
    if type(buffer_max_size) is not int or buffer_max_size < 1:
        raise ConfigError(f"group_sharded_parallel(buffer_max_size={buffer_max_size!r}) takes bytes, at least 1.")
    if exclude_layer:
        raise UnsupportedOptionError(
            f"group_sharded_parallel(exclude_layer={exclude_layer!r}) cannot be honoured: torch's fully_shard neither "
            "shards nor exchanges what it excludes. Use level='os', which shards no layer."
        )
    useless = [("sync_comm", sync_comm, False), ("segment_size", segment_size, 2**20)]
    for name, value, default in useless:
        if value != default:
            reason = "torch waits exactly where data is needed" if name == "sync_comm" else "every parameter is sharded"
            warnings.warn(
                f"group_sharded_parallel({name}={value!r}) has no effect: {reason}.", OptionWarning, stacklevel=4
            )


def save_states(model: FleetModel, output: str, optimizer: FleetOptimizer | None, writes: bool) -> None:
    """Writes full states to ``output``/model.pdmodel and model.pdopt where ``writes``; every worker must call it."""
    if not isinstance(model, FleetModel) or not isinstance(optimizer, FleetOptimizer | None):
        raise ConfigError(
            "save_group_sharded_model() takes the model and the optimizer that group_sharded_parallel() returned, got "
            f"{type(model).__name__} and {type(optimizer).__name__}."
        )
    if Path(output).is_file():
        raise CheckpointError(f"save_group_sharded_model(output={output!r}): this is a file. Name a folder.")
    state = model.full_state_dict(keep=writes)
    if writes:
        save_load.save(state, Path(output, "model.pdmodel"))
    if optimizer is not None:
        state = optimizer.full_state_dict(keep=writes)
        if writes:
            save_load.save(state, Path(output, "model.pdopt"))


def _strategies(
    session: Session,
    level: str,
    group: dist.ProcessGroup | None,
    dp_group: dist.ProcessGroup | None,
    offload: bool,
    buffer_max_size: int,
) -> list[Strategy]:
    if session.job.process_group is None:
        return []
    shards = group if group is not None else session.job.process_group
    stage = LEVELS[level]
    mesh, everyone = _mesh_of(session, shards, dp_group)
    options = DistributedStrategy()
    options.sharding = True
    options.sharding_configs = {
        "sharding_degree": dist.get_world_size(shards),
        "dp_degree": dist.get_world_size(dp_group) if dp_group is not None else 1,
        "stage": stage,
        "optimize_offload": offload,
        "segment_broadcast_MB": buffer_max_size / _MIB,
    }
    job = session.job
    record = replace(job.record, world_size=dist.get_world_size(everyone))
    # Sharding sees its own options, and the workers of one group.
    workers = replace(
        job, record=record, options=options, mesh=mesh, process_group=everyone, axes=_axes_of(mesh, everyone)
    )
    sharding = Sharding(options["sharding_configs"], workers)
    return [DataParallelJob(None, workers), sharding] if stage == 1 else [sharding]


def _mesh_of(session: Session, shards: Any, dp_group: dist.ProcessGroup | None) -> tuple[DeviceMesh, Any]:
    """Returns the mesh of the groups, and the group of all workers in it."""
    kind = session.job.device.type
    if dp_group is None or dist.get_world_size(dp_group) == 1:
        return DeviceMesh.from_group(shards, kind, mesh_dim_names=("sharding",)), shards
    copies = dist.get_process_group_ranks(dp_group)
    row = dist.get_process_group_ranks(shards)
    # Each worker knows its own row and column; groups of a grid have equal distances, which gives the other rows.
    ranks = torch.tensor([[copy - session.job.global_rank + rank for rank in row] for copy in copies], dtype=torch.int)
    if sorted(ranks.flatten().tolist()) != list(range(session.job.world_size)):
        raise ConfigError(
            f"group_sharded_parallel(): group {row} and dp_group {copies} do not make a grid of all "
            f"{session.job.world_size} workers."
        )
    mesh = DeviceMesh.from_group([dp_group, shards], kind, mesh=ranks, mesh_dim_names=("dp", "sharding"))
    return mesh, session.job.process_group
