"""Regions: the exchanges between whole and divided activations, in forward and in backward.

Each function takes the tensor of this worker and a process group, and returns this worker's result; a group of one
worker, or ``None``, changes nothing. Every one can be differentiated again.

============== ============================== ==============================
function       forward                        backward
============== ============================== ==============================
copy_to        the tensor                     sum over the group
reduce_from    sum over the group             the gradient
scatter_to     own slice of a dimension       gather
gather_from    gather                         own slice
gather_reduce  gather                         reduce-scatter
reduce_scatter own slice of the sum           gather
all_to_all     parts of one dimension for     the reverse exchange
               parts of another
============== ============================== ==============================

A loss behind ``gather_from`` is the same on all workers, so each has the whole gradient and takes its slice; behind
``gather_reduce`` each worker computes something else with the whole tensor, so the gradients are added up.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fleet.errors import ConfigError
from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._gradients.flat import gather_into, sum_scatter_into

Group: TypeAlias = "dist.ProcessGroup | None"


def group_of(group: Any) -> Group:
    """Returns torch's group behind ``group``, which may be Fleet's; ``None`` for one worker alone."""
    own = group.__dict__.get("process_group", group) if hasattr(group, "__dict__") else group
    return None if own is None or own.size() == 1 else cast("dist.ProcessGroup", own)


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Returns ``x``; backward adds up the gradients of all workers of ``group``.

    It stands where a whole activation enters a divided region, in which each worker uses it for a part.
    """
    return _crossed(_Copy, x, group)


def reduce_from(x: Tensor, group: Group, *, in_place: bool = False) -> Tensor:
    """Returns the sum of ``x`` over ``group``; backward hands the gradient on as it is.

    Args:
        x: this worker's term.
        group: the workers.
        in_place: writes the sum into ``x``; only where no backward needs the value of ``x``.
    """
    return _crossed(_ReduceInPlace if in_place else _Reduce, x, group)


def scatter_to(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Returns this worker's slice of ``x`` along ``dim``; backward gathers the slices.

    Raises:
        ConfigError: the dimension does not divide by the number of workers.
    """
    _check_divides(x, group, dim, "scatter_to")
    return _crossed(_Region, x, group, dim, own_slice, gathered)


def gather_from(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Returns the tensors of all workers of ``group`` one after the other along ``dim``; backward takes the own slice.

    Use it where all workers do the same with the result; :func:`gather_reduce` where they do not.
    """
    return _crossed(_Region, x, group, dim, gathered, own_slice)


def gather_reduce(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Returns the tensors of all workers one after the other along ``dim``; backward is a reduce-scatter."""
    return _crossed(_Region, x, group, dim, gathered, sum_slice)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Returns this worker's slice, along ``dim``, of the sum of ``x`` over ``group``; backward gathers.

    Raises:
        ConfigError: the dimension does not divide by the number of workers.
    """
    _check_divides(x, group, dim, "reduce_scatter")
    return _crossed(_Region, x, group, dim, sum_slice, gathered)


def all_to_all(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """Returns the pieces that are this worker's, of all workers: cut along ``split_dim``, joined along ``concat_dim``.

    With 4 heads on 2 workers that hold half a sequence each, ``split_dim`` the heads and ``concat_dim`` the sequence,
    each worker gets 2 heads of the whole sequence. Backward is the reverse exchange.

    Raises:
        ConfigError: the dimension that is cut does not divide by the number of workers.
    """
    _check_divides(x, group, split_dim, "all_to_all")
    return _crossed(_AllToAll, x, group, split_dim, concat_dim)


def applied(function: Any, *args: Any) -> Tensor:
    """Returns the result of an autograd ``Function``, whose ``apply`` torch has left without types."""
    return cast(Tensor, function.apply(*args))


def _crossed(function: Any, x: Tensor, group: Group, *args: Any) -> Tensor:
    """Returns the result of ``function`` over ``group``; ``x`` itself where there is one worker."""
    return x if group is None or group.size() == 1 else applied(function, x, group, *args)


def _check_divides(x: Tensor, group: Group, dim: int, call: str) -> None:
    if group is not None and x.shape[dim] % group.size():
        raise ConfigError(
            f"{call}: dimension {dim} of a tensor of shape {tuple(x.shape)} has size {x.shape[dim]}, which "
            f"{group.size()} workers cannot divide equally. Choose a size that is a multiple of {group.size()}."
        )


# ---- the exchanges, without gradients -------------------------------------------------------------------------------


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of ``x`` over ``group`` as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    with named_exchange("tensor_parallel", total, "sum"):
        dist.all_reduce(total, group=group)
    return total


def own_slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Returns a copy of this worker's equal slice of ``x`` along ``dim``."""
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size).clone(memory_format=torch.contiguous_format)


def gathered(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Returns the tensors of all workers of ``group`` along ``dim``."""
    if x.dim() == 0:
        raise ConfigError("a number has no dimension to gather along: give it one with unsqueeze(0).")
    x = x.contiguous()
    size = group.size()
    whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
    with named_exchange("tensor_parallel", whole, "gather"):
        gather_into(whole, x, group=group)
    return whole if dim in (0, -x.dim()) else torch.cat(whole.chunk(size), dim)


def sum_slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Returns this worker's slice along ``dim`` of the sum of ``x`` over ``group``."""
    size = group.size()
    whole = x.contiguous() if dim in (0, -x.dim()) else torch.cat(x.chunk(size, dim))
    part = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
    with named_exchange("tensor_parallel", whole, "sum of slices"):
        sum_scatter_into(part, whole, group=group)
    return part


def exchanged(x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    """Returns piece ``rank`` of every worker's tensor, cut along ``split_dim``, joined along ``concat_dim``."""
    size = group.size()
    out = x.contiguous() if split_dim in (0, -x.dim()) else torch.cat(x.chunk(size, split_dim))
    into = torch.empty_like(out)
    with named_exchange("tensor_parallel", out, "all to all"):
        dist.all_to_all_single(into, out, group=group)
    return into if concat_dim in (0, -x.dim()) else torch.cat(into.chunk(size), concat_dim)


# ---- the same with gradients ----------------------------------------------------------------------------------------


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return applied(_Reduce, gradients[0], ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # A copy into the group, so that a second derivative adds up what the workers did with the sum.
        return applied(_Copy, gradients[0], ctx.group), None


class _ReduceInPlace(_Reduce):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        if not x.is_contiguous():
            return summed(x, group)
        with named_exchange("tensor_parallel", x, "sum"):
            dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x


class _Region(Function):
    """Calls ``there`` in forward and ``back`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, there: Any, back: Any) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.there = there
        ctx.back = back
        return cast(Tensor, there(x, group, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return applied(_Region, gradients[0], ctx.group, ctx.dim, ctx.back, ctx.there), None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
        ctx.group = group
        ctx.split_dim = split_dim
        ctx.concat_dim = concat_dim
        return exchanged(x, group, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return applied(_AllToAll, gradients[0], ctx.group, ctx.concat_dim, ctx.split_dim), None, None, None
