"""use_hierarchical_allreduce: gradients are summed inside each group of neighbours first, then between the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet.job.axes import COPY_AXES
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy, top_level
from fleet.strategies._gradients.gradient_exchange import exchange_in


@top_level
@dataclass(frozen=True, kw_only=True)
class HierarchicalSettings(Config, owner="use_hierarchical_allreduce"):
    """The size of a group."""

    hierarchical_allreduce_inter_nranks: int = setting(
        1,
        "workers in each inner group of use_hierarchical_allreduce; 1 takes the number of workers on a node",
        at_least=1,
    )


class UseHierarchicalAllreduce(Strategy):
    """Sums gradients inside groups of neighbouring ranks, then between the groups."""

    name = "use_hierarchical_allreduce"
    meaning = "Sum gradients inside each node first, then between nodes."
    stage = Stage.COMM
    model_effect = "sums gradients inside each group of neighbours, then between the groups"
    guide = Guide(
        when="Several workers per node over gloo, and a slow network between nodes. NCCL does this by itself.",
        cost="Three messages per bucket in place of one; only one worker of each node talks to other nodes.",
        example={"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2},
    )

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when the workers cannot be divided into equal groups."""
        size = options["hierarchical_allreduce_inter_nranks"]
        if world_size % size == 0:
            return None
        return (
            f"hierarchical_allreduce_inter_nranks is {size}, which does not divide the {world_size} processes that "
            f"were started. Set it to the number of workers per node."
        )

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one group has no other to sum with."""
        if world_size > 1 and options["hierarchical_allreduce_inter_nranks"] != world_size:
            return ()
        return ("use_hierarchical_allreduce changes nothing: all workers are in one group.",)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model`` with its exchange on two levels; every worker must call this."""
        size = self.job.options["hierarchical_allreduce_inter_nranks"]
        size = size if size > 1 else self.job.local_world_size
        axes = self.job.axes
        exchange = exchange_in(model)
        if exchange is not None and 1 < size < self.job.world_size:
            levels = TwoLevels(axes.ranks(*COPY_AXES), axes.all_ranks(*COPY_AXES), size)
            exchange.sum = levels.sum
            exchange.use(self.name)
        return model


class TwoLevels:
    """The process groups of both levels: neighbours, and the first of each group of neighbours (the leaders).

    Args:
        ranks: the workers that exchange with this one.
        all_ranks: the same for every worker; all make all groups, in the same order.
        size: ranks from one multiple of ``size`` to the next are neighbours.
    """

    def __init__(self, ranks: Sequence[int], all_ranks: Sequence[Sequence[int]], size: int) -> None:
        rank = dist.get_rank()
        self._inside: Any = None
        self._between: Any = None
        # new_group() is a collective call: every worker makes the groups of all, in one order.
        for exchanging in all_ranks:
            inner = [list(near) for _, near in groupby(exchanging, lambda rank: rank // size)]
            groups = [dist.new_group(near) for near in inner]
            between = dist.new_group([near[0] for near in inner])
            if exchanging == ranks:
                place = next(place for place, near in enumerate(inner) if rank in near)
                self._inside = groups[place]
                self._between = between
                self._leader = inner[place][0]
        self._leads = rank == self._leader

    def sum(self, tensor: Tensor) -> torch.futures.Future[list[Tensor]]:
        """Adds ``tensor`` up over all workers, in place: to the leader, between leaders, and back."""
        dist.reduce(tensor, dst=self._leader, group=self._inside)
        if self._leads:
            dist.all_reduce(tensor, group=self._between)
        work = dist.broadcast(tensor, src=self._leader, group=self._inside, async_op=True)
        return cast("torch.futures.Future[list[Tensor]]", work.get_future())
