"""Exchanges over an axis of the mesh that a loop of Fleet calls itself: gradients, parameters, inputs.

``fleet.distributed_model`` does all of this by itself; these calls are for modules that it has not wrapped, and for
gradients that backward left local under ``no_sync()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError, NotInitializedError, OptionWarning
from fleet.job.running import running_job
from fleet.strategies._gradients.flat import broadcast_from_rank_0, chunks, copy_back, flattened
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import local
from fleet.strategies.tensor_parallel.equal_inputs import check_forms, first_workers
from fleet.strategies.tensor_parallel.regions import group_of
from fleet.strategies.tensor_parallel.whole_parameters import whole_tensors

__all__ = [
    "broadcast_dp_parameters",
    "broadcast_input_data",
    "broadcast_moe_sharding_parameters",
    "broadcast_mp_parameters",
    "broadcast_sep_parameters",
    "broadcast_sharding_parameters",
    "fused_allreduce_gradients",
    "fused_allreduce_gradients_with_group",
    "obtain_optimizer_parameters_list",
    "unwrap_optimizer",
]
# Paddle's default.
_BUCKET_BYTES = 128 * 1024 * 1024


def fused_allreduce_gradients(parameter_list: Iterable[Tensor], hcg: Any = None) -> None:
    """Adds up the gradients over the workers that hold the same parameters, and divides by the data-parallel ones.

    Over ``sep`` the gradients are summed, because each worker's loss covers only its tokens.

    Args:
        parameter_list: the parameters; those without a gradient are left out.
        hcg: the result of ``fleet.get_hybrid_communicate_group()``; ``None`` takes the mean over all workers.

    Raises:
        ConfigError: there is nobody to exchange with, or backward has exchanged these gradients over ``sep`` already.

    Example:
        >>> with model.no_sync():
        ...     model(x).mean().backward()
        >>> fused_allreduce_gradients(list(model.parameters()), fleet.get_hybrid_communicate_group())
    """
    axes = _axes("fused_allreduce_gradients")
    asked = tuple(axes.degrees) if hcg is None else ("dp", "sep")
    group = axes.group(*asked)
    if group is None:
        raise ConfigError(
            "fused_allreduce_gradients(): no other worker holds these parameters (dp_degree and sep_degree are 1), so "
            "there is nothing to exchange. Leave the call out."
        )
    parameters = list(parameter_list)
    # Only a sum counts gradients twice. The mean over equal gradients changes nothing, so dp needs no check.
    if hcg is not None and axes.size("sep") > 1:
        _check_local(parameters, axes.group("sep"))
    scale = 1 / group.size() if hcg is None else 1 / axes.size("dp")
    fused_allreduce_gradients_with_group(parameters, group, scale=scale)


@torch.no_grad()
def _check_local(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Raises ConfigError when the gradients are equal on the workers of ``group``, so a sum would count them again."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None and not p.grad.is_sparse]
    if group is None or not gradients:
        return
    # Equal gradients mean that backward has exchanged them; gradients that are all zero are equal without it.
    same = True
    for chunk in chunks(gradients):
        own = flattened(chunk)
        first = own.clone()
        dist.broadcast(first, group=group, group_src=0)
        same = same and torch.equal(own, first) and bool(own.any())
    # All workers decide together, since a worker that raised alone would leave the others in the exchange.
    flag = torch.tensor([same], dtype=torch.int32, device=gradients[0].device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    if flag.item():
        raise ConfigError(
            "fused_allreduce_gradients(): backward() has exchanged these gradients already, and over sep a second sum "
            "would count them again. Run backward() under model.no_sync(), or leave the call out."
        )


@torch.no_grad()
def fused_allreduce_gradients_with_group(
    parameter_list: Iterable[Tensor], group: Any, bucket_size: int = _BUCKET_BYTES, scale: float | None = None
) -> None:
    """Adds up the gradients over ``group`` in flat buffers, and multiplies them by ``scale``.

    Args:
        parameter_list: the parameters; those without a gradient are left out.
        group: the workers, torch's or Fleet's group.
        bucket_size: bytes of a buffer.
        scale: the factor; ``None`` is one over the number of workers.
    """
    workers = group_of(group)
    if workers is None:
        return
    factor = 1 / workers.size() if scale is None else scale
    gradients = [local(p.grad) for p in parameter_list if p.grad is not None]
    for chunk in chunks(gradients, bucket_size):
        flat = flattened(chunk)
        dist.all_reduce(flat, group=workers)
        copy_back(flat.mul_(factor), chunk)


def broadcast_mp_parameters(model: nn.Module, hcg: Any = None, fuse_params: bool = True) -> None:
    """Makes undivided parameters and buffers those of the first worker of the mp axis.

    Args:
        model: the model.
        hcg: accepted; the axis of the running job counts.
        fuse_params: accepted; tensors travel in flat buffers.
    """
    _broadcast(whole_tensors(model), "mp")


def broadcast_dp_parameters(model: nn.Module, hcg: Any = None, fuse_params: bool = True) -> None:
    """Makes parameters and buffers those of the first worker of the dp axis, without those marked ``no_sync``."""
    _broadcast(_all_but_experts(model), "dp")


def broadcast_sharding_parameters(model: nn.Module, hcg: Any = None, fuse_params: bool = True) -> None:
    """Makes parameters and buffers those of the first worker of the sharding axis, without those marked ``no_sync``."""
    _broadcast(_all_but_experts(model), "sharding")


def broadcast_sep_parameters(model: nn.Module, hcg: Any = None, fuse_params: bool = True) -> None:
    """Makes parameters and buffers those of the first worker of the sep axis, without those marked ``no_sync``."""
    _broadcast(_all_but_experts(model), "sep")


def broadcast_moe_sharding_parameters(model: nn.Module, hcg: Any = None, fuse_params: bool = True) -> None:
    """Makes parameters marked ``expert``, and all not marked ``no_sync``, those of the first worker of their axis.

    The axis is ``moe_sharding``, whose workers hold the same experts.
    """
    tensors = [*model.parameters(), *model.buffers()]
    chosen = [t for t in tensors if getattr(t, "expert", False) or not getattr(t, "no_sync", False)]
    _broadcast(chosen, "moe_sharding")


def _all_but_experts(model: nn.Module) -> list[Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if not getattr(t, "no_sync", False)]


def _broadcast(tensors: Sequence[Tensor], axis: str) -> None:
    group = _axes(f"broadcast_{axis}_parameters").group(axis)
    if group is not None:
        broadcast_from_rank_0([local(tensor.detach()) for tensor in tensors], group)


def broadcast_input_data(hcg: Any, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies the tensors of the first worker of the mp axis over those of the others, in place; returns the inputs.

    Args:
        hcg: accepted; the axis of the running job counts.
        inputs: tensors in tuples, lists and dictionaries; values of other kinds are left as they are.
        kwargs: the same by name.

    Raises:
        ConfigError: shapes, types, or values that are no tensors differ between the workers.
    """
    group = _axes("broadcast_input_data").group("mp")
    if group is None:
        return inputs, kwargs
    # Forms first: an exchange of tensors of other sizes would abort or wait for ever.
    check_forms((inputs, kwargs), group, values=True)
    made, differed = first_workers((inputs, kwargs), group, compares=True)
    if differed:
        warnings.warn(
            "broadcast_input_data(): the inputs differed from those of the first worker of the mp axis, and are its "
            "now. Deal the data out by fleet.data_rank() of fleet.data_replicas().",
            OptionWarning,
            stacklevel=2,
        )
    args, named = made
    return args, named


def obtain_optimizer_parameters_list(optimizer: Optimizer) -> list[Tensor]:
    """Returns every parameter of every group of ``optimizer``, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def unwrap_optimizer(optimizer: Any, optimizer_instances: type | Sequence[type] | Callable[..., Any] = ()) -> Any:
    """Returns the optimizer inside ``optimizer``.

    Args:
        optimizer: an optimizer, also a result of ``fleet.distributed_optimizer``.
        optimizer_instances: the classes of the wrappers to take off; none takes off all of this package's.
    """
    kinds: Any = tuple(optimizer_instances) if isinstance(optimizer_instances, Sequence) else optimizer_instances
    # Wrappers nest: every option that acts in the optimizer adds one.
    while isinstance(optimizer, kinds or OptimizerWrapper) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _axes(call: str) -> Any:
    job = running_job()
    if job is None:
        raise NotInitializedError(f"{call}() needs a running job: call fleet.init(is_collective=True) first.")
    return job.axes
