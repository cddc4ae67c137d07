"""OwnDraws: a loop draws different random numbers on each replica, for their rows differ."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from fleet.checks.comparison import listed_ranks
from fleet.checks.said_once import SaidOnce
from fleet.checks.same_rows import first_rows
from fleet.errors import OptionWarning
from fleet.job.axes import DATA_AXES
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel


class OwnDraws(Listener):
    """Compares the generators of the replicas once the loop has drawn from them, and warns where they are equal.

    The loop draws between a batch and the end of its forward. Draws of the DataLoader itself do not count. A loop
    without a DataLoader may draw the rows of all workers alike and use its own: before its forward, draws count only
    where the inputs are the same too.

    Args:
        job: the workers, and where they stand.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.sleeps = True
        self._before = ""  # the state from which the loop draws
        self._is_loaded = False  # a DataLoader gave the batch
        self._at_forward = ""  # the state at the beginning of forward
        self._rows = ""
        self._trains = False
        self._draws = SaidOnce(job, "draws")

    def model_wrapped(self, model: WrappedModel) -> None:
        """Looks from now on, where there are several replicas; logical workers are seeded apart in any case."""
        job = self._job
        if not self._draws.is_over and job.collective and job.data_replicas > 1 and job.logical is None:
            self._job.listeners.wake(self)

    def batch_given(self, batches: Any, batch: Any) -> None:
        """Notes the state after the draws of the DataLoader."""
        self._before = self._state()
        self._is_loaded = True

    def forward_begins(self, model: WrappedModel, inputs: Any) -> None:
        """Notes a forward that trains, and without a DataLoader its rows."""
        self._trains |= torch.is_grad_enabled() and model.training
        if not self._is_loaded:
            self._at_forward = self._state()
            self._rows = first_rows(inputs)

    def forward_ends(self) -> None:
        """Posts the state after a forward that trains, where the loop has drawn."""
        if self._trains and not torch.compiler.is_compiling():
            self._post()

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Warns where the replicas have drawn the same numbers."""
        said = self._draws.heard(self._job.axes.ranks(*DATA_AXES))
        if self._draws.is_over:
            self._job.listeners.put_to_sleep(self)
        same = [rank for rank, text in said.items() if text == said[self._job.global_rank]]
        if len(same) > 1:
            own = "data_rank" if self._job.world_size > self._job.data_replicas else "worker_index"
            warnings.warn(
                f"{self._draws.line}: {listed_ranks(same)} draw the same random numbers (noise, masks of dropout) for "
                f"their different rows: they are seeded alike. Write torch.manual_seed(seed + fleet.{own}()) after the "
                "model is made. Draw what all workers must have alike from a torch.Generator of its own.",
                OptionWarning,
                stacklevel=3,
            )
        self._before = self._state()
        self._is_loaded = False

    def _post(self) -> None:
        now = self._state()
        if self._before and now != self._before:
            draws_rows = not self._is_loaded and now == self._at_forward
            self._draws.say(now + self._rows if draws_rows else now)

    def _state(self) -> str:
        # Both generators: a mask of dropout on a GPU comes from the GPU's. A stream that is captured must not be read.
        states = [torch.get_rng_state()]
        if self._job.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            states.append(torch.cuda.get_rng_state(self._job.device))
        return hashlib.sha256(torch.cat(states).numpy().tobytes()).hexdigest()[:32]
