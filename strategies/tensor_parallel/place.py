"""Place: the part of a divided layer that this worker holds, and the group that shares the layer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.strategies._shared.parameter_layout import Layout, set_layout
from fleet.strategies.tensor_parallel.regions import group_of


class CurrentJob:
    """The facts of the job in this process that layers need; empty before ``fleet.init``, or without ``mp``.

    The strategy fills it when the job starts, because layers are created by the user and ask for their group then.

    Attributes:
        axes: the place of this worker.
        recompute_allgather: backward of a sequence-parallel layer gathers its input again.
        compared: the losses inside a model that is compared with itself with whole layers; ``None`` while none is.
    """

    axes: Axes | None = None
    recompute_allgather = False
    compared: ComparedLosses | None = None


class ComparedLosses:
    """Recognises losses that get whole logits while layers compute whole, by the logits of the same call before.

    Attributes:
        whole: whether layers that a plan has divided compute whole now; first they do not.
    """

    def __init__(self) -> None:
        self.whole = False
        self._widths: list[int] = []

    def place(self, place: LayerPlace, width: int) -> LayerPlace:
        """Returns the place at which the next loss, whose logits have ``width`` columns, is computed."""
        if not self.whole:
            self._widths.append(width)
            return place
        is_part = bool(self._widths) and self._widths.pop(0) == width
        return place if is_part else LayerPlace(None, 1, 0)


class LayerPlace:
    """The number of workers that share a layer, which of them this one is, and their process group.

    A copy of a layer shares the group. A layer that was pickled has none: it can be looked at, and computes only where
    it is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        self._group = group
        self.size = size
        self.rank = rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The workers that share the layer; ``None`` when this is the only one."""
        if self._group is None and self.size > 1:
            raise ConfigError(
                f"This layer is part {self.rank} of {self.size}, and was pickled, which loses the process group. "
                "Create the layer after fleet.init() and load its state_dict()."
            )
        return self._group

    def divided(self, size: int, layer: str, argument: str) -> int:
        """Returns this worker's share of ``size``; raises ConfigError when it is not a whole number."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{layer}({argument}={size!r}) takes a whole number of at least 1.")
        if size % self.size:
            raise ConfigError(
                f"{layer}({argument}={size}): {self.size} workers share the layer (mp_degree {self.size}), and {size} "
                f"does not divide by {self.size}. Choose a multiple of {self.size}, or another mp_degree."
            )
        return size // self.size

    def record(self, module: nn.Module, name: str, dim: int, whole: tuple[int, ...]) -> None:
        """Records which part of ``whole`` the parameter ``name`` of ``module`` is; nothing on one worker."""
        parameter = module.get_parameter(name)
        if self.size > 1:
            set_layout(module, name, Layout("mp", dim, self.size, self.rank, whole))
        else:
            parameter.__dict__["is_distributed"] = False

    def __deepcopy__(self, memo: Any) -> LayerPlace:
        return self

    def __reduce__(self) -> tuple[type[LayerPlace], tuple[None, int, int]]:
        return LayerPlace, (None, self.size, self.rank)

    def __repr__(self) -> str:
        return f"part {self.rank} of {self.size}"


def place_in(mp_group: Any, layer: str) -> LayerPlace:
    """Returns the place of this worker in ``mp_group``, torch's or Fleet's group; ``None`` is the job's mp axis.

    Raises:
        ConfigError: the group is another one than the job's mp axis, by which states and norms tell parts apart.
    """
    axes = CurrentJob.axes
    if mp_group is None:
        group = axes.group("mp") if axes is not None else None
    else:
        group = group_of(mp_group)
        if group is not None and axes is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks != axes.ranks("mp"):
                raise ConfigError(
                    f"{layer}(mp_group=...): the group has the ranks {list(ranks)}, and the mp axis of this job has "
                    f"{list(axes.ranks('mp'))} here. Parts are divided over the mp axis: leave mp_group out, or pass "
                    "fleet.get_hybrid_communicate_group().get_model_parallel_group()."
                )
    return LayerPlace(None, 1, 0) if group is None else LayerPlace(group, group.size(), group.rank())
