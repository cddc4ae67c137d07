"""OneLoss: the workers that hold one copy of the model together begin backward from one number."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.job.axes import LOSS_AXES, SEQUENCE_AXES, Axes
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.whereabouts import named, user_line
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._gradients.passes import forwards_behind
from fleet.strategies._shared.backward_calls import watch_losses
from fleet.strategies._shared.exchanged_texts import gather_texts

_FIRST = 3  # updates that are preceded by a comparison from the start
# Workers of one copy compute a loss from the same numbers in the same order; unlike kernels round otherwise.
_TOLERANCE = 1e-5


class OneLoss(Listener):
    """Compares, before the first updates of each optimizer and every ``check_every``, the losses that led to it.

    Only a worker of the last pipeline stage has a loss. Backward notes it, and the workers compare at the step, which
    all of them make, also a worker that has called no backward.

    Args:
        job: the workers, and where they stand.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.sleeps = True
        self._stop: Callable[[], None] | None = None
        self._updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._losses: list[tuple[Tensor, float]] = []  # values, and how far apart rounding may bring them
        self._line = "no line"
        self._every = 0

    def model_wrapped(self, model: WrappedModel) -> None:
        """Watches backward from now on, where other workers compute the loss too."""
        axes = self._job.axes
        self._every = self._job.options["check_every"]
        if self._every and self._stop is None and axes.size(*LOSS_AXES) > 1 and axes.rank("pp") == axes.size("pp") - 1:
            self._stop = watch_losses(self._note)
            self._job.listeners.wake(self)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raises ConfigError on all workers of a copy where their losses differ; a collective call."""
        if not has_closure:
            self._compare(optimizer)

    def after_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Compares the losses of a closure."""
        if has_closure:
            self._compare(optimizer)

    def close(self) -> None:
        """Stops watching backward."""
        if self._stop is not None:
            self._stop()

    def _note(self, loss: Tensor, gradient: Tensor | None) -> None:
        numbers = list(self._updates.values()) or [0]  # of the updates to come, by optimizer
        due = any(is_checked(number, self._every) for number in numbers)
        if not due or loss.grad_fn is None or not forwards_behind(loss):  # another model is the script's own affair
            return
        with torch.no_grad():
            value = loss.detach().double() * (1.0 if gradient is None else gradient)
        self._losses.append((value, max(_TOLERANCE, 2 * torch.finfo(loss.dtype).eps)))
        self._line = user_line()

    def _compare(self, optimizer: Optimizer) -> None:
        number = self._updates.get(optimizer, 0)
        losses = self._losses
        axes = self._job.axes
        self._updates[optimizer] = number + 1
        self._losses = []
        group = axes.group(*LOSS_AXES) if is_checked(number, self._every) else None
        if group is None:
            return
        text = json.dumps([self._line, [(float(value), tolerance) for value, tolerance in losses]])
        said = [json.loads(other) for other in gather_texts(text, group, self._job.device)]
        if not are_one([row for _, row in said]):
            shown = [(line, [value for value, _ in row]) for line, row in said]
            raise ConfigError(different_losses(shown, axes.ranks(*LOSS_AXES), axes))


def is_checked(number: int, every: int) -> bool:
    """Returns whether the losses before the update ``number``, counted from 0, are compared; ``every`` 0: never."""
    return every > 0 and (number < _FIRST or number % every == 0)


def are_one(rows: Sequence[Sequence[tuple[float, float]]]) -> bool:
    """Returns whether all ``rows`` of losses, each with its tolerance, hold the same values.

    Example:
        >>> are_one([[(1.0, 1e-5)], [(1.000001, 1e-5)]]), are_one([[(1.0, 1e-5)], []])
        (True, False)
    """
    first = rows[0]
    return all(
        len(row) == len(first)
        and all(
            math.isclose(a, b, rel_tol=far, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
            for (a, far), (b, _) in zip(row, first, strict=True)
        )
        for row in rows
    )


def different_losses(said: Sequence[tuple[str, Sequence[float]]], ranks: Sequence[int], axes: Axes) -> str:
    """Returns the message about ``ranks``, which each ``said`` their last line with backward and their losses."""
    numbers = {len(losses) for _, losses in said}
    if len(numbers) > 1:
        found = [f"{len(losses)} losses" for _, losses in said]
    else:
        at = next(at for at in range(min(numbers)) if not are_one([[(losses[at], _TOLERANCE)] for _, losses in said]))
        found = [f"{losses[at]:.7g}" for _, losses in said]
    rows = [
        f"  {named([rank], axes.described)}: {what} at {line}"
        for rank, (line, _), what in zip(ranks, said, found, strict=True)
    ]
    advice = []
    if (parts := axes.size(*SEQUENCE_AXES)) > 1:
        advice.append(
            "Along sep and cp write each term of the loss as fleet.mean(sum over the own tokens, number of own "
            f"tokens). A mean over own tokens has gradients that are {parts} times too large; a sum divided by the "
            "tokens of the whole sequence is a part of the loss: give the sum to fleet.mean()."
        )
    if axes.size("mp") > 1:
        advice.append(
            "Along mp compute it from whole outputs (gather_output=True, 'column_gather' in a plan) or with "
            "ParallelCrossEntropy, from the same labels (rows fleet.data_rank() of fleet.data_replicas()) and with the "
            "same dropout masks on whole activations. A penalty on divided weights is added up over their parts: "
            "fleet.layers.mpu.mp_ops._mp_allreduce(p.square().sum())."
        )
    return (
        "step(): workers that hold one copy of the model together began backward from different losses:\n"
        + "\n".join(rows)
        + "\nEach must call backward() on the loss of the whole. "
        + " ".join(advice)
    )
