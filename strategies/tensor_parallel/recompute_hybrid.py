"""recompute_hybrid: activation checkpointing whose inputs wait for backward in shares, one on each worker of mp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fleet.errors import ConfigError
from fleet.strategies._shared.segments import OnHost, SegmentInputs, run_segment, worth_moving
from fleet.strategies.tensor_parallel.place import place_in
from fleet.strategies.tensor_parallel.regions import gathered

_KEYS = ("mp_group", "offload", "partition")


def recompute_hybrid(ctx: Mapping[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns ``function(*args, **kwargs)``, whose activations are computed again in backward.

    Args:
        ctx: ``{"mp_group": group, "offload": False, "partition": False}``. ``offload`` lets the inputs wait in pinned
            host memory; with ``partition`` each worker of the group keeps its share of every input, which is equal
            on all of them, and backward gathers it.
        function: a module or a function.
        args: its inputs.
        kwargs: handed to ``function``.

    Raises:
        ConfigError: ``ctx`` has no ``mp_group`` or an unknown key, or the group cannot divide an input equally.

    Example:
        >>> group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
        >>> y = recompute_hybrid({"mp_group": group, "partition": True}, block, x)
    """
    unknown = set(ctx) - set(_KEYS)
    if "mp_group" not in ctx or unknown:
        raise ConfigError(
            f"recompute_hybrid(ctx={dict(ctx)!r}): ctx has the key 'mp_group' and may have 'offload' and 'partition'. "
            "Pass fleet.get_hybrid_communicate_group().get_model_parallel_group()."
        )
    group = place_in(ctx["mp_group"], "recompute_hybrid").group
    partition = bool(ctx.get("partition", False))
    offload = bool(ctx.get("offload", False))
    if not partition or group is None or not torch.is_grad_enabled():
        return run_segment(function, args, kwargs, None, None if offload else set())
    for place, value in enumerate(args):
        if isinstance(value, Tensor) and value.numel() % group.size():
            raise ConfigError(
                f"recompute_hybrid(partition=True): input {place} of shape {tuple(value.shape)} has {value.numel()} "
                f"elements, which {group.size()} workers cannot divide equally. Set partition to False."
            )
    return run_segment(function, args, kwargs, inputs=SharedInputs(args, kwargs, group, offload))


class SharedInputs(SegmentInputs):
    """The inputs of a segment; each worker of a group keeps a share of them between forward and backward.

    Args:
        args: positional inputs, equal on all workers; their tensors are shared.
        kwargs: named inputs, which are kept whole.
        group: the workers.
        offload: the shares wait on the host.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup, offload: bool) -> None:
        super().__init__(args, kwargs, set())
        self._group = group
        self._offload = offload

    def take(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs, gathered."""
        args, kwargs = super().take()
        return tree_map_only(_Share, _Share.whole, args), kwargs

    def set_aside(self) -> None:
        """Keeps this worker's share of every tensor."""

        def share(tensor: Tensor) -> Any:
            return tensor if isinstance(tensor, nn.Parameter) else _Share(tensor, self._group, self._offload)

        self._args = tuple(tree_map_only(Tensor, share, self._args))


class _Share:
    """This worker's share of a tensor that all workers of a group have."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, offload: bool) -> None:
        self._group = group
        self._shape = tensor.shape
        self._requires_grad = tensor.requires_grad
        own = tensor.detach().reshape(-1).chunk(group.size())[group.rank()].clone()
        self._own: Any = OnHost(own) if offload and worth_moving(own) else own

    def whole(self) -> Tensor:
        own = self._own.back() if isinstance(self._own, OnHost) else self._own
        return gathered(own, self._group, 0).view(self._shape).requires_grad_(self._requires_grad)
