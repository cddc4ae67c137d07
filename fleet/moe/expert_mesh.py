"""The workers around a layer of experts: the holders of experts and of copies, and the sources of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from fleet.errors import ConfigError
from fleet.job.axes import COPY_AXES
from fleet.job.running import running_session
from fleet.strategies.tensor_parallel.regions import applied, group_of


def expert_group() -> dist.ProcessGroup | None:
    """Returns the workers among which the running job divides experts; ``None`` for one alone."""
    session = running_session()
    return None if session is None else session.job.axes.group("ep")


class ExpertMesh:
    """The groups that one layer of experts uses; a copy of the layer shares them.

    Args:
        moe_group: the workers among which the experts are divided; ``None`` is the ep axis of the job.
        mp_group: the workers that have the same tokens and each take a slice; ``None`` for none, ``False`` where the mp
            workers have different tokens already.

    Raises:
        ConfigError: ``moe_group`` is not the ep axis of the job, or the mp workers are not accounted for.
    """

    def __init__(self, moe_group: Any = None, mp_group: Any = None) -> None:
        session = running_session()
        axes = None if session is None else session.job.axes
        own = (0,) if axes is None else axes.ranks("ep")
        asked = own if moe_group is None else _ranks(moe_group)
        if len(asked) > 1 and asked != own:
            raise ConfigError(
                f"MoELayer(moe_group=...) got the workers {list(asked)}; this job divides experts among {list(own)}. "
                "Leave moe_group out and set hybrid_configs['ep_degree'] (with sharding_degree for workers on "
                "different data)."
            )
        if len(asked) < len(own):
            raise ConfigError(
                f"MoELayer(moe_group=...) got one worker, and hybrid_configs['ep_degree'] is {len(own)}: leave "
                "moe_group out, or set ep_degree to 1."
            )
        self.size = len(own)
        self.rank = 0 if axes is None else axes.rank("ep")
        mp_size = 1 if axes is None else axes.size("mp")
        if self.size > 1 and mp_size > 1 and mp_group is None:
            raise ConfigError(
                f"MoELayer in a job with ep_degree={self.size} and mp_degree={mp_size} needs to know the tokens of "
                "the mp workers. Pass mp_group=fleet.get_hybrid_communicate_group().get_model_parallel_group() where "
                "all of them have the same tokens (each then takes a slice), or mp_group=False where sequence parallel "
                "has divided the tokens already."
            )
        self.slices = mp_group is not None and mp_group is not False and mp_size > 1
        self.divided = self.slices or mp_group is False

    def __deepcopy__(self, memo: Any) -> ExpertMesh:
        return self

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The workers among which the experts are divided."""
        return self._along("ep") if self.size > 1 else None

    @property
    def mp(self) -> dist.ProcessGroup | None:
        """The workers that each take a slice of the same tokens, or that have different ones of them."""
        return self._along("mp") if self.divided else None

    @property
    def sources(self) -> list[Any]:
        """Groups that together hold the tokens that one process would see, the innermost first."""
        groups = [self.mp, self._along(*COPY_AXES)]
        return [group for group in groups if group is not None]

    def shared(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the experts' parameters for one forward; in backward their gradients become complete.

        An expert without tokens gets zeros. Where experts are divided, the sum over the workers that hold copies is
        divided by the number of data replicas, which data parallel does for all other parameters. Else a layer that
        slices its tokens adds the slices up.
        """
        session = running_session()
        group = self.mp
        divisor = 1
        if self.size > 1:
            group = self._along("moe_sharding")
            assert session is not None
            if session.options["gradient_scale_configs"].scale_strategy == "avg":
                divisor = session.job.axes.data_replicas
        apply: Any = _Shared.apply
        return list(apply(group, divisor, *parameters))

    def counts(self, own: Tensor) -> tuple[Tensor, int]:
        """Returns the counts of all workers whose tokens one process would see, in order, and this worker's place."""
        rows = own.unsqueeze(0)
        place = 0
        block = 1
        for group in self.sources:
            parts = [torch.empty_like(rows) for _ in range(group.size())]
            dist.all_gather(parts, rows, group=group)
            rows = torch.cat(parts)
            # The rows of the inner groups form one block of the next group.
            place += group.rank() * block
            block *= group.size()
        return rows, place

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over the workers whose tokens one process would see.

        In backward each gets the gradient times the number of data replicas: data parallel divides by that later.
        """
        session = running_session()
        total = x
        if not self.sources or session is None:
            return x
        averaged = session.options["gradient_scale_configs"].scale_strategy == "avg"
        factor = session.job.axes.data_replicas if averaged else 1
        for group in self.sources:
            total = applied(_Sum, total, group, factor)
            # The factor acts once: the backward of every further sum would multiply by it again.
            factor = 1
        return total

    def _along(self, *axes: str) -> dist.ProcessGroup | None:
        session = running_session()
        if session is None:
            if self.size > 1:
                raise ConfigError(
                    f"This MoELayer holds part {self.rank} of {self.size} of its experts, and no job is running. Call "
                    "fleet.init(), create the layer, and load its state_dict()."
                )
            return None
        return session.job.axes.group(*axes)


class _Shared(Function):
    @staticmethod
    def forward(ctx: Any, group: Any, divisor: int, *parameters: Tensor) -> Any:
        ctx.group = group
        ctx.divisor = divisor
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # One exchange for all: experts with tokens differ between workers, and so does the order of their gradients.
        found = [g / ctx.divisor for g in gradients]
        if ctx.group is not None:
            flat = torch.cat([g.float().flatten() for g in found])
            dist.all_reduce(flat, group=ctx.group)
            parts = flat.split([g.numel() for g in found])
            found = [part.view_as(g).to(g.dtype) for part, g in zip(parts, found, strict=True)]
        return None, None, *found


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, factor: int) -> Tensor:
        ctx.factor = factor
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None, None


def _ranks(group: Any) -> tuple[int, ...]:
    """Returns the ranks of torch's or Fleet's group."""
    own = group_of(group)
    return (0,) if own is None else tuple(dist.get_process_group_ranks(own))
