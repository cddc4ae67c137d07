"""CountedLoss: the mean of a batch whose loss function returns (sum, count), known when its last micro-batch is.

[Note: Divided at the end]
Other stages cannot wait for the count of the batch before they begin backward. So every micro-batch adds the gradient
of its sum divided by one number, a power of two that is the same on all workers and near the count of the batch before;
after the step all gradients are multiplied by that number over the true count. In 16 bits they keep the size of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.errors import ConfigError


class CountedLoss:
    """Sums and counts of the micro-batches of a step on the last stage; see [Note: Divided at the end].

    Args:
        group: the workers that compute this stage's loss of other rows or tokens; ``None`` is this worker alone.
        joined: returns the sum over those of them that have the same rows; backward hands the gradient on.
        averaged: the number by which the exchange divides the sum of the gradients.
    """

    def __init__(
        self, group: Any = None, joined: Callable[[Tensor], Tensor] = lambda own: own, averaged: float = 1.0
    ) -> None:
        self._group = group
        self._joined = joined
        self._averaged = averaged
        self._size = 0.0
        self._pairs: list[Tensor] = []

    def begin(self) -> None:
        """Begins a step."""
        self._pairs = []

    def take(self, total: Any, count: Any) -> tuple[Tensor, Tensor]:
        """Returns the tensor where backward begins for a micro-batch, and its own mean.

        Raises ConfigError for anything but two numbers.
        """
        if not isinstance(total, Tensor) or total.numel() != 1 or torch.as_tensor(count).numel() != 1:
            raise ConfigError(
                "loss_fn(output, label) of the PipelineLayer returned a pair that is not (sum of the loss, count): "
                "each is a tensor of one element, the count may be a number."
            )
        both = [torch.as_tensor(one, device=total.device).detach() for one in (total, count)]
        pair = torch.stack([one.double().reshape(()) for one in both])
        # In the first step no count is known. All workers need one divisor, so they take the largest first count.
        if not self._size:
            largest = pair[1].clone()
            if self._group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            self._size = _power_of_two(float(largest))
        self._pairs.append(pair)
        mean = pair[0] / torch.where(pair[1] == 0, 1.0, pair[1])
        # One value along sep and cp; the gradient is this worker's share.
        return self._joined(total.reshape(()) / self._size), mean.to(total.dtype)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the mean over the batch on all workers, and the factor for its gradients."""
        sums = torch.stack(self._pairs).sum(0)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        count = torch.where(sums[1] == 0, 1.0, sums[1])
        # take() has divided the gradients by _size and the exchange by _averaged; the mean divides by the count alone.
        factor = self._size * self._averaged / count
        if sums[1] > 0:
            self._size = _power_of_two(float(sums[1]) / self._averaged)
        return sums[0] / count, factor


def _power_of_two(number: float) -> float:
    return 2.0 ** math.floor(math.log2(number)) if number > 0 else 1.0
