"""LogicalValues: numbers of logical workers, and their means over all of them, in an order that does not change."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._shared.exchanged_texts import gather_texts
from fleet.strategies.reproducible.tree import tree_sum


class LogicalValues:
    """Collects values in the turns of a round, and gives their means where the round ends.

    The sum follows the tree of the gradients, in 64 bits. Where the batches of a round have counts (``fleet.mean``),
    each value weighs as much as its batch counts.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: dist.ProcessGroup | None = None
        self._rows: dict[tuple[str, ...], dict[int, list[float]]] = {}
        self._round = -1

    def of(self, call: str, values: dict[str, float], step: int) -> dict[str, float] | None:
        """Returns the means over all logical workers; ``None`` in a turn after which others of this process follow.

        Values that are given in the last turn of every process alone are no values of a batch: their mean over the
        processes is returned.

        Raises:
            ConfigError: the processes give other names, or some turns of a round give values and some do not.
        """
        logical = self._job.logical
        assert logical is not None
        if self._round != logical.round:
            self._rows = {}
            self._round = logical.round
        names = tuple(sorted(values))
        rows = self._rows.setdefault(names, {})
        rows[logical.rank] = [logical.count, *(values[name] for name in names)]
        if not logical.is_last:
            return None
        del self._rows[names]
        said = self._gathered([list(names), step, rows])
        if any(other[:2] != said[0][:2] for other in said):
            raise ConfigError(
                f"{call}: the workers give other names or steps: "
                + "; ".join(f"worker {rank}: step {at}, {given}" for rank, (given, at, _) in enumerate(said))
                + ". Call it on every worker with the same names."
            )
        everyone = {int(rank): row for _, _, found in said for rank, row in found.items()}
        return dict(zip(names, self._means(call, logical, everyone), strict=True))

    def _means(self, call: str, logical: LogicalWorkers, rows: dict[int, list[float]]) -> list[float]:
        ranks = sorted(rows)
        if len(ranks) not in (logical.num, logical.num_hosts):
            raise ConfigError(
                f"{call} was given values of logical workers {ranks} of {logical.num} in one round. Call it in every "
                "batch; or, for values that are no batch's, where fleet.update_loss(loss) has returned a number."
            )
        counts = [rows[rank][0] for rank in ranks]
        total = tree_sum(counts)
        columns = zip(*(rows[rank][1:] for rank in ranks), strict=True)
        if total == 0:
            return [0.0 for _ in columns]
        return [
            tree_sum([value * count if count else 0.0 for value, count in zip(column, counts, strict=True)]) / total
            for column in columns
        ]

    def _gathered(self, own: list[Any]) -> list[Any]:
        job = self._job
        if job.world_size == 1:
            return [json.loads(json.dumps(own))]
        if self._group is None:
            job.meet("fleet.update_loss() or fleet.log()")
            timeout = timedelta(milliseconds=Environment().float("PADDLE_PG_TIMEOUT"))
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        with job.explaining():
            return [json.loads(text) for text in gather_texts(json.dumps(own), self._group, torch.device("cpu"))]

    def close(self) -> None:
        """Releases the group."""
        self._group = None
