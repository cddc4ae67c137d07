"""Schedulers and averages of a model act once an update, however many turns a process has in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import fleet
from fleet.strategies.reproducible.once_an_update import OnceAnUpdate
from tests.strategies.reproducible.turns import network, same, sgd, start, train, weights, wrapped

UPDATES = 7


class Halving(schedulers.LRScheduler):
    """A scheduler with a step of its own."""

    def step(self, epoch: int | None = None) -> None:
        """Halves the rate."""
        super().step(epoch)

    def get_lr(self) -> list[Any]:
        """Returns the rates."""
        return [base * 0.5**self.last_epoch for base in self.base_lrs]


MAKERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=10),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "SWALR": lambda o: SWALR(o, 0.5, anneal_epochs=4),
    "Halving": Halving,
}


def rates(optimizer: Any, scheduler: Any, steps: int, step: Callable[[], None]) -> list[float]:
    """Returns the rates after each of ``steps`` calls of ``step``, which follow plain torch's."""
    found = []
    for _ in range(steps):
        optimizer.step()
        step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_step_once_an_update(name: str) -> None:
    start(3)
    net = network()
    model, optimizer = wrapped(net)
    scheduler = MAKERS[name](optimizer)
    found: list[float] = []

    def after() -> None:
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))

    train(model, optimizer, range(UPDATES), after=after)
    plain = sgd(network())
    other = MAKERS[name](plain)
    first = float(plain.param_groups[0]["lr"])
    expected = rates(plain, other, UPDATES, other.step)
    assert found[2::3] == expected
    assert found[:2] == [first] * 2
    assert len({*expected}) > 1


def test_a_plateau_is_told_once_an_update() -> None:
    logical = start(3)
    model, optimizer = wrapped(network())
    scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    train(model, optimizer, range(6), after=lambda: scheduler.step(1.0) if logical.is_last else None)
    assert scheduler.num_bad_epochs < 2
    assert optimizer.get_lr() == 0.1 * 0.5**2
    assert scheduler.last_epoch == 6


@pytest.mark.parametrize("inner", [True, False])
def test_the_scheduler_may_have_the_users_optimizer(inner: bool) -> None:
    start(2)
    net = network()
    own = sgd(net)
    model, optimizer = wrapped(net, own)
    scheduler = schedulers.StepLR(own if inner else optimizer, 1, 0.5)
    train(model, optimizer, range(2), after=scheduler.step)
    assert optimizer.get_lr() == 0.1 * 0.25


def test_a_class_that_is_declared_later_steps_once_an_update() -> None:
    start(2)
    model, optimizer = wrapped(network())

    class Late(schedulers.LRScheduler):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            calls.append(self.last_epoch)

        def get_lr(self) -> list[Any]:
            return [*self.base_lrs]

    calls: list[int] = []
    scheduler = Late(optimizer)
    train(model, optimizer, range(3), after=lambda: scheduler.step())
    assert calls == [0, 1, 2, 3]


def test_a_scheduler_that_is_made_in_a_turn_sets_its_first_rate() -> None:
    start(2)
    model, optimizer = wrapped(network())
    made: list[Any] = []

    def after() -> None:
        if not made:
            made.append(schedulers.LinearLR(optimizer, start_factor=0.5, total_iters=2))
        assert optimizer.get_lr() == 0.05

    train(model, optimizer, range(1), after=after)
    assert made[0].last_epoch == 0


def test_rounds_of_gradient_merge_are_one_update() -> None:
    start(2, gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model, optimizer = wrapped(network())
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, range(4), after=scheduler.step)
    assert optimizer.get_lr() == 0.1 * 0.25


def test_schedulers_of_other_optimizers_step_as_ever() -> None:
    start(2)
    model, optimizer = wrapped(network())
    other = sgd(network())
    scheduler = schedulers.StepLR(other, 1, 0.5)

    other.step()
    train(model, optimizer, range(2), after=scheduler.step)
    assert scheduler.last_epoch == 4


# ---- averages of a model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model", "module", "layer"])
def test_an_average_is_updated_once_an_update(part: str) -> None:
    start(3)
    net = network()
    model, optimizer = wrapped(net)
    given = {"model": model, "module": net, "layer": net[0]}[part]
    averaged = AveragedModel(net[0] if part == "layer" else net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = copy.deepcopy(averaged)

    def after() -> None:
        averaged.update_parameters(given)

    for update in range(3):
        train(model, optimizer, [update], after=after)
        expected.update_parameters(net[0] if part == "layer" else net)
        assert int(averaged.n_averaged) == update + 1
        assert same(weights(averaged), weights(expected))


def test_averages_of_other_models_are_as_ever() -> None:
    start(2)
    model, optimizer = wrapped(network())
    other = network()
    averaged = AveragedModel(other)
    train(model, optimizer, range(2), after=lambda: averaged.update_parameters(other))
    assert int(averaged.n_averaged) == 4


# ---- the end --------------------------------------------------------------------------------------------------------


def test_the_methods_are_given_back() -> None:
    kinds = [schedulers.LRScheduler, schedulers.SequentialLR, schedulers.ReduceLROnPlateau, Halving]
    before = [vars(kind)["step"] for kind in kinds]
    average = vars(AveragedModel)["update_parameters"]
    start(2)
    assert all(vars(kind)["step"] is not was for kind, was in zip(kinds, before, strict=True))
    start(3)  # the end of the job before
    fleet.fleet._instance()._close()
    assert [vars(kind)["step"] for kind in kinds] == before
    assert vars(AveragedModel)["update_parameters"] is average


def test_another_librarys_wrapper_stays() -> None:
    class Wrapped(schedulers.LRScheduler):
        def step(self, epoch: int | None = None) -> None:
            """Never called."""

    def theirs(self: Any, epoch: int | None = None) -> None:
        """Never called."""

    once = OnceAnUpdate(start(2), list, list)
    Wrapped.step = theirs  # type: ignore[method-assign]
    once.close()
    assert vars(Wrapped)["step"] is theirs
