"""fleet.update_loss: one number for each update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fleet
from fleet.errors import ConfigError
from tests.helpers.fleets import own_fleet
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import network, square, start, train, wrapped


def losses(rank: int, world_size: int, rounds: int = 1) -> list[float | None]:
    """Returns what each turn of three updates gets."""
    start(5, gradient_merge=rounds > 1, gradient_merge_configs={"k_steps": rounds})
    model, optimizer = wrapped(network())
    found = []

    def loss_of(model: Any, update: int, logical_rank: int) -> torch.Tensor:
        loss = square(model, update, logical_rank)
        found.append(fleet.update_loss(loss))
        return loss

    train(model, optimizer, range(3 * rounds), loss_of)
    return found


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_the_same_bits_on_any_number_of_workers(processes: int) -> None:
    (alone,) = run_workers(losses, 1, backend=None)
    expected = [loss for loss in alone if loss is not None]
    assert [loss is None for loss in alone] == 3 * [True, True, True, True, False]
    assert len(set(expected)) == 3
    for found in run_workers(losses, processes, backend=None):
        assert [loss for loss in found if loss is not None] == expected


def test_it_is_none_until_the_last_round_of_an_update() -> None:
    found = losses(0, 1, rounds=2)
    assert [place for place, loss in enumerate(found) if loss is not None] == [9, 19, 29]


def plain(rank: int, world_size: int) -> float | None:
    """Returns the loss of a batch without the option."""
    fleet.init(is_collective=True, log_level="ERROR")
    return fleet.update_loss(torch.tensor(float(rank)))


def test_without_the_option_every_batch_has_a_number() -> None:
    assert run_workers(plain, 3, backend=None) == [1.0, 1.0, 1.0]


def test_without_a_job_it_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)
    assert fleet.update_loss(torch.tensor([0.5], requires_grad=True)) == 0.5


@pytest.mark.parametrize("wrong", ["0.5", None, torch.zeros(2)])
def test_it_takes_a_number(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"fleet.update_loss\(\).*'loss'"):
        fleet.update_loss(wrong)
