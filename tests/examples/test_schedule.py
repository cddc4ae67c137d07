"""The learning rate over a run: it depends on the step alone, which is what lets a run be resumed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.examples.scripts import example_module

schedule = example_module("schedule")


@pytest.mark.parametrize("num_steps", [5, 10, 220])
def test_it_rises_for_a_fifth_and_then_falls_to_almost_nothing(num_steps: int) -> None:
    factors = [schedule.warmup_cosine(step, num_steps) for step in range(num_steps)]
    peak = num_steps // 5 - 1
    assert factors[peak] == max(factors) == 1.0
    assert all(a < b for a, b in pairwise(factors[: peak + 1]))
    assert all(a > b for a, b in pairwise(factors[peak + 1 :]))
    assert 0 < factors[-1] < 0.2


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_shortest_runs_have_a_learning_rate(num_steps: int) -> None:
    assert all(0 < schedule.warmup_cosine(step, num_steps) <= 1 for step in range(num_steps))


def test_a_scheduler_that_starts_late_goes_on_where_the_other_stopped() -> None:
    """003-37: what the checkpoint script does with ``last_epoch``."""

    def rates(start: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
        optimizer.param_groups[0]["initial_lr"] = 0.3
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule.warmup_cosine(step, 20), last_epoch=start - 1
        )
        found = []
        for _ in range(start, 20):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(8) == rates(0)[8:]
