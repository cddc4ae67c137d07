"""BatchLoops: due checkpoints, and a stop on request, where a training loop asks for its next batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from fleet.common.log import LOGGER
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel

Batch = TypeVar("Batch")


class PeriodicSave:
    """A checkpoint of the training run, which may write itself every so many steps.

    Attributes:
        path: its folder.
        every: the number of steps between two saves; 0 saves on demand only.
    """

    path: Path
    every: int

    @property
    def step(self) -> int:
        """The number of steps of the training run, including those before a restart."""
        raise NotImplementedError

    def save(self, *, wait: bool = False) -> None:
        """Writes the state; every worker calls it after the same step."""
        raise NotImplementedError

    def save_when_due(self, sampler: object = None) -> None:
        """Saves when enough steps have passed since the last time; called between two batches."""
        raise NotImplementedError

    def saves_by_itself(self, data: object) -> bool:
        """Returns whether it saves the position in ``data`` every so many steps."""
        raise NotImplementedError


class BatchLoops(Listener):
    """The loops of one job.

    A loop over something of Fleet's says when it asks for its next batch (:meth:`over`). Any other loop begins a batch
    with the model's next forward. Where the position of other data is saved, that data may have given its next batch
    already: in such a loop, and where ``zip`` asks one after the other. ``holds_untrained`` says so.

    Args:
        job: hears where a loop begins a batch.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._running = 0  # loops that say when they ask for their next batch
        self.checkpoints: list[PeriodicSave] = []
        self.holds_untrained = False
        self.sleeps = True
        told = partial(job.listeners.tell, "batch_given")
        self._stop = watch_loaders(told) if job.collective and job.world_size > 1 else None

    def close(self) -> None:
        """Stops watching DataLoaders, and says where batches have waited for an update in vain."""
        logical = self._job.logical
        is_left = logical is not None and (logical.is_amid_update if logical.is_open else bool(logical.place))
        if logical is not None and is_left and getattr(sys, "last_value", None) is None:  # an error has said more
            LOGGER.warning(
                f"The training has ended after {logical.place + logical.is_open} of {len(logical.ranks)} batches of an "
                "update; their gradients were not used. Leave the loop where fleet.update_loss(loss) returns a number."
            )
        if self._stop is not None:
            self._stop()

    @property
    def is_running(self) -> bool:
        """Whether a loop runs that says when it asks for its next batch."""
        return self._running > 0

    def add(self, checkpoint: PeriodicSave) -> None:
        """Writes ``checkpoint`` where it is due."""
        self.checkpoints.append(checkpoint)
        self._job.listeners.wake(self)

    def after_batch(self, data: object = None) -> None:
        """Writes the checkpoints that are due, and exits when asked to stop; called where a loop begins a batch.

        ``data`` is the object that the loop goes over, where that is known.
        """
        logical = self._job.logical
        if logical is not None:
            if logical.loop is data:
                logical.end_turn()
            if not logical.is_at_update:
                return
        # A save of the position in other data is one batch too far now: that batch is given and not trained yet.
        self.holds_untrained = True
        try:
            for checkpoint in self.checkpoints:
                checkpoint.save_when_due(data)
            self._job.listeners.tell("next_batch")
        finally:
            self.holds_untrained = False

    def over(self, data: object, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields ``batches`` of ``data``; before each of them, and after the last, comes :meth:`after_batch`.

        Before the first one too: a loop may end with a batch and never ask for another, as ``next(iter(data))`` does.
        """
        self._running += 1
        try:
            self.after_batch(data)
            for batch in batches:
                yield batch
                self.after_batch(data)
        except GeneratorExit:
            if self._job.logical is not None:
                self._job.logical.leave_loop(data)
            raise
        finally:
            self._running -= 1

    def before_forward(self, model: WrappedModel) -> None:
        """Begins a batch before a forward that trains, in a loop that does not say when it asks for one."""
        in_turn = self._job.logical is not None and self._job.logical.is_open
        if (
            self.checkpoints
            and not (self._running or in_turn)
            and torch.is_grad_enabled()
            and self._job.models[0].training
        ):
            self.after_batch()


def watch_loaders(given: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Calls ``given`` with torch's iterator and each batch of every DataLoader, until the returned function is."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    # Scripts iterate over torch's own DataLoader, which has no hook for a batch that it gives.
    kind: Any = _BaseDataLoaderIter
    original = kind.__next__

    @wraps(original)
    def give(self: Any) -> Any:
        batch = original(self)
        given(self, batch)
        return batch

    kind.__next__ = give

    def stop() -> None:
        # Another library may have wrapped it since; its wrapper stays.
        if kind.__next__ is give:
            kind.__next__ = original

    return stop
