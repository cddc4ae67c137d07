"""LogicalValues: numbers of logical workers, and their means over all of them, in an order that does not change."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._shared.exchanged_texts import gather_texts
from fleet.strategies.reproducible.tree import tree_sum


class LogicalValues:
    """Collects values in the turns of an update, and gives their means at its end.

    The sum follows the tree of the gradients, in 64 bits. Where the batches of an update have counts (``fleet.mean``),
    each value weighs as much as its batch counts.

    Args:
        job: the job.
        group_of: returns the group of its processes for values; takes the call, which every process makes.
    """

    def __init__(self, job: Job, group_of: Callable[[str], dist.ProcessGroup]) -> None:
        self._job = job
        self._group_of = group_of
        # By call, round and rank: the count of the batch, and the values.
        self._rows: dict[tuple[Any, ...], dict[tuple[int, int], list[float]]] = {}
        self._update = -1
        self._turn = (-1, -1)
        self._calls: Counter[tuple[Any, ...]] = Counter()  # of the present turn

    def of(self, call: str, values: dict[str, float], step: int) -> dict[str, float] | None:
        """Returns the means over all batches of an update; ``None`` in a turn that does not end it.

        Values that are given in the last turn of every process alone are no values of a batch: their mean over the
        processes is returned.

        Raises:
            ConfigError: the processes give other names, or some turns of an update give values and some do not.
        """
        logical = self._job.logical
        assert logical is not None
        self._follow(logical)
        names = tuple(sorted(values))
        # A batch may give a name twice, as update_loss(loss) and log({"loss": loss}).
        key = call, names, self._calls[call, names]
        self._calls[call, names] += 1
        rows = self._rows.setdefault(key, {})
        rounds = 1 if self._evaluates() else logical.rounds_per_update
        rows[logical.round_in_update % rounds, logical.rank] = [logical.count, *(values[name] for name in names)]
        if logical.is_amid_update if rounds > 1 else not logical.is_last:
            return None
        del self._rows[key]
        said = self._gathered([list(names), step, [[*place, row] for place, row in rows.items()]])
        if any(other[:2] != said[0][:2] for other in said):
            raise ConfigError(
                f"{call}: the workers give other names or steps: "
                + "; ".join(f"worker {rank}: step {at}, {given}" for rank, (given, at, _) in enumerate(said))
                + ". Call it on every worker with the same names."
            )
        everyone = [
            [row for number, _, row in sorted(row for _, _, found in said for row in found) if number == wanted]
            for wanted in range(rounds)
        ]
        self._check_whole(call, logical, [len(rows) for rows in everyone])
        return {name: _mean(everyone, column) for column, name in enumerate(names, start=1)}

    def _follow(self, logical: LogicalWorkers) -> None:
        """Begins anew with each update, and counts the calls of each turn."""
        update = logical.round - logical.round_in_update
        if self._update != update:
            self._rows = {}
            self._update = update
        turn = logical.round, logical.place
        if self._turn != turn:
            self._calls.clear()
            self._turn = turn

    def _evaluates(self) -> bool:
        """Returns whether no update follows, in which case each round has means."""
        return not torch.is_grad_enabled() and not any(model.training for model in self._job.models)

    def _check_whole(self, call: str, logical: LogicalWorkers, given: list[int]) -> None:
        batches = logical.num * len(given)
        if sum(given) == batches or (given[-1] == sum(given) == logical.num_hosts):
            return
        raise ConfigError(
            f"{call} was given values of {sum(given)} of {batches} batches of an update. Call it in every batch; or, "
            "for values that are no batch's, where fleet.update_loss(loss) has returned a number."
        )

    def _gathered(self, own: list[Any]) -> list[Any]:
        job = self._job
        if job.world_size == 1:
            return [json.loads(json.dumps(own))]
        group = self._group_of("fleet.update_loss() or fleet.log()")
        with job.explaining():
            return [json.loads(text) for text in gather_texts(json.dumps(own), group, torch.device("cpu"))]


def _mean(rounds: list[list[list[float]]], column: int) -> float:
    """Returns the mean of the values at ``column`` of the rows; a row begins with its count."""
    rows = [row for found in rounds for row in found]
    if all(row[column] == rows[0][column] for row in rows):
        return rows[0][column]  # such as the learning rate: the same, however many processes give it
    total = 0.0
    weight = 0.0
    for found in filter(None, rounds):
        total += tree_sum([count * row[column] if (count := row[0]) else 0.0 for row in found])
        weight += tree_sum([row[0] for row in found])
    return total / weight if weight else 0.0
