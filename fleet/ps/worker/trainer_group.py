"""TrainerGroup: what the trainers of hybrid training exchange without the servers: sums and copies of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.errors import PSError

# All trainers of the job, each of which makes the same calls in the same order.
TrainerGroup: TypeAlias = "SingleTrainer | ProcessGroupTrainers"


class SingleTrainer:
    """The only trainer of a job.

    Example:
        >>> SingleTrainer().start_sum(torch.ones(2))()
    """

    rank, size = 0, 1

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Does nothing: ``tensor`` is the sum over all trainers already."""
        return lambda: None

    def copy_from_0(self, tensor: Tensor) -> None:
        """Does nothing."""


class ProcessGroupTrainers:
    """The trainers as a process group of torch: gloo for tensors on the host, NCCL for those on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Starts to replace ``tensor`` with its sum over all trainers; call the result to wait for it.

        The wait raises PSError when a trainer is gone.
        """
        work: Any = self._tried(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

        def wait() -> None:
            self._tried(work.wait)

        return wait

    def copy_from_0(self, tensor: Tensor) -> None:
        """Replaces ``tensor`` with trainer 0's; raises PSError when a trainer is gone."""
        source = dist.get_global_rank(self._group, 0)
        self._tried(lambda: dist.broadcast(tensor, src=source, group=self._group))

    def _tried(self, act: Callable[[], object]) -> object:
        try:
            return act()
        except (RuntimeError, torch.distributed.DistError) as error:
            raise PSError(
                f"hybrid training, trainer {self.rank} of {self.size}: the exchange of dense gradients failed: a "
                "trainer is gone or silent. Look at the logs of the others. An all-reduce needs every trainer: restart "
                "all of them from checkpoints of the same step; the servers keep their tables."
            ) from error
