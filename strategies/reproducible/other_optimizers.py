"""OtherOptimizers: an optimizer that the job does not know keeps nothing from one batch to the next."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper


class OtherOptimizers:
    """Looks at every step of an optimizer in this process.

    A loop may take steps of its own inside a batch, as on the inputs or on weights of an inner loop. An optimizer that
    steps in several batches trains its parameters on the batches of this process alone.

    Args:
        job: says when it steps an optimizer itself.
        logical: the logical workers.
    """

    def __init__(self, job: Job, logical: LogicalWorkers) -> None:
        self._job = job
        self._logical = logical
        # The turn in which each has stepped first.
        self._first: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._handle = register_optimizer_step_pre_hook(self._check)

    def close(self) -> None:
        """Stops looking."""
        self._handle.remove()

    def _check(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        logical = self._logical
        if self._job.updating or not logical.is_open or isinstance(optimizer, OptimizerWrapper):
            return
        turn = logical.round, logical.place
        if self._first.setdefault(optimizer, turn) != turn:
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called in a second batch, and distributed_optimizer() has not "
                "seen that optimizer. With 'reproducible' it would train on the batches of this process alone. Give "
                "its module to distributed_model() and it to distributed_optimizer(), or make a new one in each batch."
            )
