"""Buffers of logical workers: each begins a turn with the model's, and those of logical worker 0 become the model's.

As in DistributedDataParallel, which sends worker 0's buffers to all others before each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._gradients.flat import broadcast_from_rank_0


class TurnBuffers:
    """The buffers of all models of a job.

    Those of logical worker 0 become the model's with the first ``step()`` of the last turn of a round, or without one
    at its end.

    Args:
        models: returns the models.
        logical: the logical workers.
        group: the processes; ``None`` with one.
    """

    def __init__(self, models: Callable[[], Sequence[nn.Module]], logical: LogicalWorkers, group: Any) -> None:
        self._models = models
        self._logical = logical
        self._group = group
        self._of_model: list[Tensor] = []  # at the beginning of the round
        self._of_first: list[Tensor] = []  # of logical worker 0, after its turn
        self._shapes: list[torch.Size] = []  # at the beginning of the turn
        self._is_shared = False
        logical.begins.append(self._begin)
        logical.ends.append(self._end)

    def _buffers(self) -> Iterator[Tensor]:
        for model in self._models():
            yield from model.buffers()

    @torch.no_grad()
    def _begin(self, rank: int) -> None:
        """Gives logical worker ``rank`` the buffers of the model."""
        own = list(self._buffers())
        self._shapes = [buffer.shape for buffer in own]
        if self._logical.place == 0:
            self._is_shared = False
            self._of_model = [buffer.clone() for buffer in own] if len(self._logical.ranks) > 1 else []
            return
        self._check_shapes([buffer.shape for buffer in self._of_model], self._shapes)
        _put(self._of_model, own)

    def _end(self) -> None:
        """Keeps the buffers of logical worker 0."""
        if self._logical.is_last:
            self._share()
        elif self._logical.rank == 0:
            self._of_first = [buffer.clone() for buffer in self._buffers()]

    def note_step(self) -> None:
        """Notes a step of an optimizer, after which no model is trained in this turn.

        Raises ConfigError where buffers were registered in it, or one has got another shape.
        """
        self._check_shapes(self._shapes, [buffer.shape for buffer in self._buffers()])
        if self._logical.is_last:
            self._share()

    def _check_shapes(self, before: Sequence[torch.Size], now: Sequence[torch.Size]) -> None:
        if len(now) != len(before):
            raise ConfigError(
                f"{len(now) - len(before)} buffers were registered since the round began. With 'reproducible' each "
                "logical worker begins with the buffers of the model: register them in __init__(), not in forward()."
            )
        for old, new in zip(before, now, strict=True):
            if old != new:
                raise ConfigError(
                    f"A buffer of shape {list(old)} has the shape {list(new)} after a batch. With 'reproducible' each "
                    "logical worker begins with the buffers of the model: keep their shapes, for example by a buffer "
                    "of the largest size and a count."
                )

    def _share(self) -> None:
        """Makes the buffers those of logical worker 0, on every process."""
        own = list(self._buffers())
        if not own or self._is_shared:
            return
        self._is_shared = True
        if self._logical.host == 0:
            _put(self._of_first, own)
        if self._group is not None:
            broadcast_from_rank_0(own, self._group)
        self._of_first = []


@torch.no_grad()
def _put(kept: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    # Buffers that were registered since have no earlier value.
    for old, buffer in zip(kept, buffers, strict=False):
        if old.shape == buffer.shape:
            buffer.copy_(old)
