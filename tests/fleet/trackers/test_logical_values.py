"""Values of logical workers: their means have the same bits on any number of processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError
from tests.helpers.workers import WorkerError, run_workers
from tests.strategies.reproducible.turns import network, rows, start, summed, turns, wrapped


def value_of(rank: int, round_: int = 0) -> float:
    """Returns a value of which the sum depends on the order."""
    return [1e16, 1.0, -1e16, 0.3, 0.1][rank] + round_


def logged(rank: int, world_size: int, rounds: int) -> list[Any]:
    """Logs in each turn, and at the end of the update; returns what was returned."""
    start(5, gradient_merge=rounds > 1, gradient_merge_configs={"k_steps": rounds})
    model, optimizer = wrapped(network())
    found: list[Any] = []
    for _ in range(2):
        for round_ in range(rounds):
            for logical_rank in fleet.elastic.logical_ranks():
                model(rows(round_, logical_rank)).mean().backward()
                optimizer.step()
                means = fleet.log({"a": value_of(logical_rank, round_), "b": math.nan if logical_rank == 4 else 1.0})
                if means:
                    found.append((logical_rank, means["a"], str(means["b"]), fleet.log({"rate": 0.1})["rate"]))
                else:
                    assert turns().is_amid_update
    return found


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_means_over_logical_workers(processes: int, rounds: int) -> None:
    """The sum is that of the tree. A value that all give alike, as a learning rate, stays what it is."""
    total = sum(summed([value_of(rank, round_) for rank in range(5)]) for round_ in range(rounds))
    for found in run_workers(logged, processes, rounds, backend=None):
        assert len(found) == 2
        assert {mean for _, mean, *_ in found} == {total / (5 * rounds)}
        assert {each[2:] for each in map(tuple, found)} == {("nan", 0.1)}


def test_an_evaluation_has_a_value_for_each_round() -> None:
    """No update comes, however many rounds make one."""
    start(2, gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    model, _ = wrapped(network())
    model.eval()
    seen = []
    with torch.no_grad():
        for round_ in range(2):
            for rank in fleet.elastic.logical_ranks():
                seen.append(fleet.update_loss(float(rank + round_)))
    assert seen == [None, 0.5, None, 1.5]


def test_a_batch_may_give_a_name_twice() -> None:
    start(3)
    seen: list[Any] = []
    for rank in fleet.elastic.logical_ranks():
        for factor in (1, 10):
            seen.append(fleet.log({"loss": float(rank * factor)}))
        seen.append(fleet.update_loss(float(rank * 100)))
    assert seen == [{}, {}, None, {}, {}, None, {"loss": 1.0}, {"loss": 10.0}, 100.0]


def test_values_weigh_as_much_as_their_batches() -> None:
    start(3)
    model, optimizer = wrapped(network())
    found = None
    losses = []
    for rank in fleet.elastic.logical_ranks():
        count = [3, 0, 5][rank]
        loss = fleet.mean(model(rows(0, rank, count)).square().sum(), count)
        loss.backward()
        optimizer.step()
        losses.append((float(loss.detach()), count))
        found = fleet.log({"loss": loss if count else math.nan})
    assert found == {"loss": sum(loss * count for loss, count in losses) / 8}


def test_where_nothing_counts_the_mean_is_0() -> None:
    start(2)
    model, _ = wrapped(network())
    for rank in fleet.elastic.logical_ranks():
        fleet.mean(0 * model(rows(0, rank)).sum(), 0)
        found = fleet.log({"loss": float(rank)})
    assert found == {"loss": 0.0}


def test_values_of_some_batches_only_are_refused() -> None:
    start(3)
    for rank in fleet.elastic.logical_ranks():
        if rank == 1:
            fleet.log({"loss": 1.0})
        if rank == 2:
            with pytest.raises(ConfigError, match=r"fleet.log\(\) was given values of 2 of 3 batches of an update"):
                fleet.log({"loss": 1.0})


def other_names(rank: int, world_size: int) -> None:
    """Logs other names on each worker."""
    start(2)
    for logical_rank in fleet.elastic.logical_ranks():
        fleet.log({f"loss {logical_rank}": 1.0})


def test_other_names_are_refused_on_every_worker() -> None:
    said = r"give other names or steps: worker 0: step 0, \['loss 0'\]; worker 1: step 0, \['loss 1'\]"
    with pytest.raises(WorkerError, match=said):
        run_workers(other_names, 2, backend=None)


def test_an_update_that_was_left_is_forgotten() -> None:
    start(2)
    loop = fleet.elastic.logical_ranks()
    next(loop)
    fleet.log({"loss": 100.0})
    next(loop)
    next(loop, None)  # the last turn gave none
    found: Any = None
    for rank in fleet.elastic.logical_ranks():
        found = fleet.log({"loss": float(rank)})
    assert found == {"loss": 0.5}


def test_outside_of_turns_each_process_gives_a_value() -> None:
    start(3)
    assert fleet.log({"loss": torch.tensor(2.0)}) == {"loss": 2.0}
