"""Inputs, and labels that no loss shows, are equal on workers that hold parts of one model."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from fleet.common.outside_graphs import outside_graphs
from fleet.errors import ConfigError, OptionWarning
from fleet.strategies._shared.stages import on_any

_FIRST = 3  # forwards that are compared; later ones where their number is a power of two
_ADVICE = (
    "These workers hold parts of one model and must see the same rows. Deal the data out by fleet.data_rank() of "
    "fleet.data_replicas(), as fleet.elastic.ElasticSampler does: DistributedSampler(dataset, "
    "num_replicas=fleet.data_replicas(), rank=fleet.data_rank())"
)


class Occasions:
    """Selects calls for a comparison: the first, then those whose number is a power of two; alike on all workers."""

    def __init__(self, first: int = _FIRST) -> None:
        self._first = first
        self._calls = 0

    def now(self) -> bool:
        """Counts a call; returns whether it is looked at."""
        self._calls += 1
        return self._calls <= self._first or self._calls & (self._calls - 1) == 0


class EqualInputs:
    """A forward pre-hook that makes the inputs equal those of the first worker of a group, or checks that they are.

    The first forwards are compared, and then those whose number is a power of two.

    Args:
        group: the workers; ``None`` does nothing.
        copies: True copies tensors in place and warns once where they differed; False raises there.
    """

    def __init__(self, group: dist.ProcessGroup | None, copies: bool) -> None:
        self._group = group
        self._copies = copies
        self._occasions = Occasions()
        self._warned = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs before forward; returns the inputs.

        Raises:
            ConfigError: shapes differ, or values do where nothing is copied.
        """
        if self._group is None:
            return None
        compares = self._occasions.now()
        if not compares and not self._copies:
            return None
        # The forms first: a broadcast between tensors of other sizes would hang or mix numbers.
        if compares:
            check_forms((args, kwargs), self._group)
        made, differed = first_workers((args, kwargs), self._group, compares, self._copies)
        if compares and not self._copies and any(on_any([differed], self._group)):
            ranks = dist.get_process_group_ranks(self._group)
            raise ConfigError(f"The inputs of forward differ between the workers {ranks}. {_ADVICE}.")
        if differed and self._copies and not self._warned:
            self._warned = True
            warnings.warn(
                f"the inputs of forward differed from those of worker {dist.get_global_rank(self._group, 0)}, which "
                "hybrid_configs['mp_configs']['need_broadcast_data'] has copied over them. What does not pass "
                f"through forward (labels of a loss outside the model) is still this worker's. {_ADVICE}.",
                OptionWarning,
                stacklevel=2,
            )
        return made

    def __deepcopy__(self, memo: Any) -> EqualInputs:
        return EqualInputs(self._group, self._copies)

    def __reduce__(self) -> tuple[type[EqualInputs], tuple[None, bool]]:
        return EqualInputs, (None, self._copies)


@outside_graphs
def _is_equal(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Returns, alike on every worker of ``group``, whether all have the same ``tensor``."""
    sizes = torch.tensor([tensor.numel(), -tensor.numel()], device=tensor.device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=group)
    if int(sizes.sum()):
        return False  # the largest is not the smallest
    _, differed = first_workers(tensor.detach(), group, compares=True, copies=False)
    return not any(on_any([differed], group))


def check_labels(label: Tensor, group: dist.ProcessGroup) -> None:
    """Raises ConfigError on every worker of ``group`` unless all have the same labels.

    The loss does not show it: each worker picks those logits that it holds, and the sum over the workers is one number.
    """
    if not _is_equal(label, group):
        raise ConfigError(
            f"ParallelCrossEntropy: the labels differ between the workers {dist.get_process_group_ranks(group)}. "
            f"{_ADVICE}."
        )


@outside_graphs
def check_forms(inputs: Any, group: dist.ProcessGroup, values: bool = False) -> None:
    """Raises ConfigError on every worker of ``group`` unless all have tensors of the same shapes and types.

    With ``values``, numbers and texts must be the same too.
    """
    leaves = [(path, leaf) for path, leaf in tree_flatten_with_path(inputs)[0]]
    text = "; ".join(f"{path} {_form(leaf, values)}" for path, leaf in leaves)
    own = torch.tensor([zlib.crc32(text.encode())], device=_device(leaf for _, leaf in leaves))
    every = own.new_empty(group.size())
    dist.all_gather(list(every.split(1)), own, group=group)
    if len(set(every.tolist())) > 1:
        shapes = [tuple(leaf.shape) for _, leaf in leaves if isinstance(leaf, Tensor)]
        raise ConfigError(
            f"The inputs differ in structure, shape or type{' or value' if values else ''} between the workers "
            f"{dist.get_process_group_ranks(group)}; this one has tensors of shapes {shapes}. {_ADVICE}."
        )


def _form(leaf: Any, values: bool) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if values and isinstance(leaf, bool | int | float | str) else type(leaf).__name__


def _device(leaves: Any) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


@outside_graphs
@torch.no_grad()
def first_workers(inputs: Any, group: dist.ProcessGroup, compares: bool, copies: bool = True) -> tuple[Any, bool]:
    """Returns ``inputs`` with the tensors of the first worker of ``group``, and whether this worker's differed.

    Args:
        inputs: tuples, lists and dictionaries with tensors, which are written in place where their memory allows it.
        group: the workers.
        compares: False skips the comparison; the answer is then False.
        copies: False leaves the tensors as they are.
    """
    differed: list[Tensor] = []

    def receive(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or not tensor.numel():
            return tensor
        # Received in place where nothing is compared; a comparison needs the own values, and gaps need a copy.
        in_place = copies and not compares and tensor.is_contiguous()
        buffer = tensor.detach() if in_place else tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(buffer, group=group, group_src=0)
        if compares and group.rank():
            differed.append((_bytes(buffer) != _bytes(tensor.detach().contiguous())).any())
        if not copies or in_place:
            return tensor
        if _overlaps(tensor):
            return buffer
        tensor.detach().copy_(buffer)
        return tensor

    made = tree_map_only(Tensor, receive, inputs)
    return made, bool(torch.stack([d.cpu() for d in differed]).any()) if differed else False


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # by bits, so that NaN equals NaN


def _overlaps(tensor: Tensor) -> bool:
    """Returns whether two elements share memory, as in an expanded tensor."""
    strides: Sequence[int] = tensor.stride()
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=True))
