"""Sequence parallelism: between divided layers each worker of the mp axis holds its part of the sequence.

The sequence is dimension 0 of every activation: ``[sequence, batch, hidden]``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fleet.errors import ConfigError, OptionWarning
from fleet.strategies.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, shared_bias
from fleet.strategies.tensor_parallel.place import CurrentJob, place_in
from fleet.strategies.tensor_parallel.regions import (
    Group,
    gather_from,
    gather_reduce,
    gathered,
    reduce_from,
    reduce_scatter,
    scatter_to,
)

_MARK = "sequence_parallel"
_SUM = "fleet_sequence_sum"


class ScatterOp:
    """Takes this worker's part of a whole sequence; backward gathers.

    Example:
        >>> x = ScatterOp.apply(x)
    """

    @staticmethod
    def apply(input: Tensor, group: Any = None) -> Tensor:
        """Returns the part of ``input`` along dimension 0.

        Raises:
            ConfigError: the sequence does not divide by the number of workers.
        """
        return scatter_to(input, _group(group), 0)


class GatherOp:
    """Joins the parts of a sequence where all workers go on with the same computation; backward takes the own part."""

    @staticmethod
    def apply(input: Tensor, group: Any = None) -> Tensor:
        """Returns the whole of ``input`` along dimension 0."""
        return gather_from(input, _group(group), 0)


class AllGatherOp:
    """Joins the parts of a sequence in front of a divided layer; backward adds up and takes the own part."""

    @staticmethod
    def apply(input: Tensor, group: Any = None) -> Tensor:
        """Returns the whole of ``input`` along dimension 0."""
        return gather_reduce(input, _group(group), 0)


class ReduceScatterOp:
    """Adds up the workers' results for the whole sequence and takes the own part; backward gathers."""

    @staticmethod
    def apply(input: Tensor, group: Any = None) -> Tensor:
        """Returns the part of the sum of ``input`` along dimension 0.

        Raises:
            ConfigError: the sequence does not divide by the number of workers.
        """
        return reduce_scatter(input, _group(group), 0)


def _group(group: Any) -> Group:
    return place_in(group, "sequence_parallel_utils").group


class ColumnSequenceParallelLinear(ColumnParallelLinear):
    """A :class:`ColumnParallelLinear` whose input is this worker's part of the sequence; it gathers the whole first.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the whole output; the number of workers must divide it.
        weight_attr: as for :class:`ColumnParallelLinear`.
        has_bias: True adds a bias; ``None`` is False.
        gather_output: must be False where several workers share the layer.
        fuse_matmul_bias: accepted; torch fuses product and bias anyway.
        mp_group: the workers that share the layer; ``None`` is the mp axis of the job.
        name: accepted for Fleet's signature.

    Raises:
        ConfigError: ``gather_output`` is True, which is the default in Fleet's signature, or a size does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, weight_attr, has_bias, gather_output, fuse_matmul_bias, mp_group, name
        )
        if gather_output and self.place.size > 1:
            raise ConfigError(
                "ColumnSequenceParallelLinear(gather_output=True) cannot divide the sequence again; pass "
                "gather_output=False."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns this worker's columns of the product with the whole sequence."""
        group = self.place.group
        if group is None:
            return F.linear(x, self.weight, self.bias)
        if CurrentJob.recompute_allgather and torch.is_grad_enabled():
            return _linear_of_gathered(x, self.weight, self.bias, group)
        return F.linear(gather_reduce(x, group, 0), self.weight, self.bias)


class RowSequenceParallelLinear(RowParallelLinear):
    """A :class:`RowParallelLinear` that returns this worker's part of the sequence.

    The bias is added to the part, so that its gradient is a sum over the workers; it marks itself as such.

    Args:
        in_features: size of the whole input; the number of workers must divide it.
        out_features: size of the output.
        weight_attr: as for :class:`ColumnParallelLinear`.
        has_bias: False leaves the bias out.
        input_is_parallel: must be True where several workers share the layer.
        fuse_matmul_bias: True adds ``b / workers`` on each before the sum.
        mp_group: the workers that share the layer; ``None`` is the mp axis of the job.
        name: accepted for Fleet's signature.

    Raises:
        ConfigError: ``input_is_parallel`` is False, which is the default in Fleet's signature, or a size does not
            divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, weight_attr, has_bias, input_is_parallel, fuse_matmul_bias, mp_group, name
        )
        if not input_is_parallel and self.place.size > 1:
            raise ConfigError(
                "RowSequenceParallelLinear(input_is_parallel=False) would need a whole input, which no worker has; "
                "pass input_is_parallel=True."
            )
        if self.bias is not None and not fuse_matmul_bias:
            mark_as_sequence_parallel_parameter(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Returns this worker's part of the sequence of the whole product."""
        group = self.place.group
        if group is None:
            return F.linear(x, self.weight, self.bias)
        if self.fuse_matmul_bias and self.bias is not None:
            return reduce_scatter(F.linear(x, self.weight, shared_bias(self.bias, self.place.size)), group, 0)
        y = reduce_scatter(F.linear(x, self.weight), group, 0)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _linear_of_gathered(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Returns the product with the gathered ``x``; backward keeps ``x`` alone and gathers it again."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))  # the type of the product, so that backward needs no other copy
    # autograd saves the gathered tensor, or a view of it, in F.linear: recognised by its memory, it is left out.
    whole = gather_reduce(x, group, 0)
    part = x.detach()
    place = whole.data_ptr()

    def pack(saved: Tensor) -> Any:
        if saved.data_ptr() != place or saved.numel() != whole_size or saved.dtype != part.dtype:
            return saved
        return saved.shape, saved.stride()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return gathered(part, group, 0).as_strided(*kept)

    whole_size = whole.numel()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.linear(whole, weight, bias)


# ---- parameters that see a part of the sequence ---------------------------------------------------------------------


def mark_as_sequence_parallel_parameter(parameter: Tensor) -> None:
    """Marks an undivided parameter that is used on a part: its gradient is then the sum over the mp axis.

    It serves norms between the layers of this module, and parameters inside divided heads or columns.

    Example:
        >>> for parameter in torch.nn.LayerNorm(8).parameters():
        ...     mark_as_sequence_parallel_parameter(parameter)
    """
    setattr(parameter, _MARK, True)


def is_sequence_parallel_parameter(parameter: Tensor) -> bool:
    """Returns whether :func:`mark_as_sequence_parallel_parameter` was called for ``parameter``."""
    return bool(getattr(parameter, _MARK, False))


def sum_marked_gradients(named: Iterable[tuple[str, Tensor]], group: Group) -> int:
    """Makes every backward add up the gradients of marked parameters over ``group``; once each, and returns how many.

    ``distributed_model`` calls it; a parameter that was seen before is left alone.
    """
    marked = [(name, p) for name, p in named if is_sequence_parallel_parameter(p) and p.requires_grad]
    for name, parameter in marked if group is not None else ():
        if not hasattr(parameter, _SUM):
            setattr(parameter, _SUM, True)
            parameter.register_hook(SummedGradient(name, group))
    return len(marked)


class SummedGradient:
    """A hook on a parameter: the sum of its gradients over a group, before anything else sees them.

    Once, it warns of gradients that were equal on all workers: the parameter saw the whole sequence.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None) -> None:
        self._name = name
        self._group = group
        self._looks = 2

    def __call__(self, gradient: Tensor) -> Tensor:
        """Returns the sum."""
        if self._group is None:
            return gradient
        total = reduce_from(gradient, self._group)
        if self._looks:
            self._looks -= 1
            self._look(gradient.detach(), total.detach(), self._group)
        return total

    def _look(self, gradient: Tensor, total: Tensor, group: dist.ProcessGroup) -> None:
        # Equal gradients on n workers make a sum of n times the own gradient. One message decides for all workers.
        norms = torch.stack([(total - group.size() * gradient).float().norm(), total.float().norm()])
        dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=group)
        apart, norm = norms.tolist()
        if norm > 0 and apart <= 1e-6 * norm:
            self._looks = 0
            warnings.warn(
                f"{self._name!r} is marked with mark_as_sequence_parallel_parameter(), and its gradient is the same on "
                f"every worker: it has probably seen the whole sequence, and the sum is {group.size()} times too "
                "large. Mark only parameters that are used on a part.",
                OptionWarning,
                stacklevel=2,
            )

    def __deepcopy__(self, memo: Any) -> SummedGradient:
        return self

    def __reduce__(self) -> tuple[type[SummedGradient], tuple[str, None]]:
        return SummedGradient, (self._name, None)


def register_sequence_parallel_allreduce_hooks(
    model: nn.Module, accumulation_steps: int = 1, fuse_sequence_parallel_allreduce: bool = False
) -> None:
    """Makes backward add up the gradients of marked parameters over the mp axis.

    ``distributed_model`` has done so for parameters that were marked before it; a second call changes nothing.

    Args:
        model: the model, wrapped or not.
        accumulation_steps: accepted; each backward adds up, which gives the same sum whatever the number is.
        fuse_sequence_parallel_allreduce: accepted; every parameter travels by itself, as soon as it is ready.

    Raises:
        ConfigError: ``accumulation_steps`` is no whole number.
    """
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int):
        raise ConfigError(
            "register_sequence_parallel_allreduce_hooks(accumulation_steps="
            f"{accumulation_steps!r}) takes a whole number."
        )
    sum_marked_gradients(model.named_parameters(), _group(None))
