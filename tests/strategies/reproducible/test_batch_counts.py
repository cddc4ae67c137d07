"""BatchCounts: the number by which the gradients of an update are divided."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies.reproducible.batch_counts import BatchCounts
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import summed

CPU = torch.device("cpu")


def count_of(rank: int, round_: int) -> float:
    """Returns a count whose sum depends on the order."""
    return 1e16 if rank == 1 else 1.0 + 2 * round_


def turn(logical: LogicalWorkers, count: float | None) -> None:
    logical.begin_turn(None)
    if count is not None:
        logical.count, logical.is_counted = count, True


def divisors(rank: int, world_size: int) -> dict[str, float]:
    """Returns the sum of the counts for each number of logical workers, and of rounds."""
    found = {}
    for num in range(world_size, 8):
        for rounds in (1, 2):
            logical = LogicalWorkers(num, world_size, rank, rounds)
            counts = BatchCounts(logical, dist.group.WORLD if world_size > 1 else None)
            for _ in range(2):  # the second update begins anew
                for round_ in range(rounds):
                    for place in logical.ranks:
                        turn(logical, count_of(place, round_))
                        if not logical.is_amid_update:
                            found[f"{num} {rounds}"] = counts.divisor(-1.0, CPU)
                        counts.note_batch()
                        logical.end_turn()
                counts.clear()
    return found


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_sum_is_that_of_the_tree(processes: int) -> None:
    for found in run_workers(divisors, processes):
        assert len(found) == 2 * (8 - processes)
        for key, divisor in found.items():
            num, rounds = map(int, key.split())
            sums = [summed([count_of(rank, round_) for rank in range(num)]) for round_ in range(rounds)]
            assert divisor == sum(sums), key


def test_without_a_mean_it_is_the_number_of_batches() -> None:
    logical = LogicalWorkers(2, 1, 0)
    counts = BatchCounts(logical, None)
    turn(logical, None)
    counts.note_batch()
    logical.end_turn()
    turn(logical, None)
    assert counts.divisor(2.0, CPU) == 2.0


def test_where_nothing_counts_the_gradient_is_that_of_the_total() -> None:
    logical = LogicalWorkers(1, 1, 0)
    counts = BatchCounts(logical, None)
    turn(logical, 0.0)
    assert counts.divisor(2.0, CPU) == 1.0


def test_a_mean_in_some_batches_only_is_refused() -> None:
    logical = LogicalWorkers(2, 1, 0)
    counts = BatchCounts(logical, None)
    turn(logical, 3.0)
    counts.note_batch()
    logical.end_turn()
    turn(logical, None)
    with pytest.raises(ConfigError, match=r"called in 1 of 2 batches of an update.*fleet.mean\(0 \* model\(x\)"):
        counts.divisor(2.0, CPU)
