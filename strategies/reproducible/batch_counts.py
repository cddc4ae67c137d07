"""BatchCounts: the counts of the batches of an update, by whose sum their gradients are divided."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers, hosted_blocks
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.reproducible.tree import tree_sum


class BatchCounts:
    """The counts that ``fleet.mean`` was given in the turns of an update.

    Args:
        logical: the logical workers.
        group: the processes; ``None`` with one.
    """

    def __init__(self, logical: LogicalWorkers, group: Any) -> None:
        self._logical = logical
        self._group = group
        self._own: list[float | None] = []  # of the turns that have ended; None without a mean

    def note_batch(self) -> None:
        """Keeps the count of the turn that ends."""
        self._own.append(self._present)

    def clear(self) -> None:
        """Begins a new update."""
        self._own = []

    @property
    def _present(self) -> float | None:
        return self._logical.count if self._logical.is_counted else None

    def divisor(self, without: float, device: torch.device) -> float:
        """Returns the sum of all counts of the update, whose last turn is under way; ``without`` any that number.

        They are exchanged on ``device``.

        Raises ConfigError where some batches of the update have a mean and some have none.
        """
        own = [*self._own, self._present]
        with_mean = [count for count in own if count is not None]
        if not with_mean:
            return without
        if len(with_mean) < len(own):
            raise ConfigError(
                f"fleet.mean() was called in {len(with_mean)} of {len(own)} batches of an update on this worker. With "
                "'reproducible' the loss of each batch is a mean, or of none: a batch in which nothing counts is "
                "fleet.mean(0 * model(x).sum(), 0)."
            )
        logical = self._logical
        blocks = hosted_blocks(logical.num, logical.num_hosts)
        counts = [with_mean]
        if self._group is not None:
            row = torch.zeros(len(blocks[0]) * logical.rounds_per_update, dtype=torch.float64, device=device)
            row[: len(own)] = torch.tensor(with_mean, dtype=torch.float64)
            rows = [torch.empty_like(row) for _ in blocks]
            wait_for(dist.all_gather(rows, row, group=self._group, async_op=True))
            counts = [found.tolist() for found in rows]
        total = 0.0
        for number in range(logical.rounds_per_update):
            by_rank = [
                found[number * len(block) + place]
                for found, block in zip(counts, blocks, strict=True)
                for place in range(len(block))
            ]
            total += tree_sum(by_rank)
        return total or 1.0
