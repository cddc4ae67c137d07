"""The window of an update: what its passes count, and the scale of their gradients."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import ConfigError
from fleet.training.mean_window import Ahead, Call, Sums, Window, are_equal, divisor

ONE = torch.ones(())


def call(window: Window, count: float, everywhere: float | None = None, ahead: float | None = None) -> Call:
    """Returns a call that counted ``count`` here and ``everywhere`` on all workers, for two of them."""
    made = Call(Sums(count, count), 2.0, [window], ())
    made.ahead = ahead
    made.value = 1.0
    if everywhere is not None:
        made.everywhere = Sums(everywhere, everywhere)
        waiting = window.counted.alone
        made.waiting = None if waiting is None else Sums(2 * waiting.total, 2 * waiting.count)
    return made


def test_the_scale_follows_the_counts() -> None:
    gradient = torch.tensor([0.0])
    window = Window(lambda: [gradient])
    assert window.enter(call(window, 4), ONE, 1, None) == 0.5
    assert window.enter(call(window, 12), ONE, 2, None) == 0.5  # local passes have one scale
    gradient.fill_(8.0)
    last = call(window, 16, everywhere=32)
    assert window.enter(last, ONE, 3, None) == 2.0 / 64
    assert gradient.item() == 8.0 * (2.0 / 64) / 0.5
    assert window.enter(last, ONE, 4, None) == 2.0 / 64  # backward again counts nothing
    window.end_update()
    assert window.enter(call(window, 1, everywhere=2), ONE, 5, None) == 1.0


def test_a_window_goes_on_where_it_was_saved() -> None:
    window, other = Window(list), Window(list)
    window.enter(call(window, 4), ONE, 1, None)
    window.end_batch()
    noted = window.noted()
    assert noted is not None
    other.restore(noted)
    assert other.enter(call(other, 4, everywhere=8), ONE, 2, None) == 2.0 / 16
    other.drop_batch()
    assert other.counted.alone == Sums(4.0, 4.0)


def test_what_cannot_be_taken_apart_is_refused() -> None:
    window = Window(list)
    window.enter(call(window, 4, everywhere=8), ONE, 1, None)
    window.enter(call(window, 2, everywhere=3), ONE, 1, None)  # two means of one pass may count differently
    with pytest.raises(ConfigError, match="update_count="):
        window.enter(call(window, 4, everywhere=8), ONE, 2, None)
    window.end_update()
    for task in (1, 2):
        assert window.enter(call(window, 4, ahead=10.0), ONE, task, None) == 0.2
        assert window.enter(call(window, 1, ahead=4.0), ONE, task, None) == 0.5
    window.end_update()
    window.enter(call(window, 4, everywhere=8), ONE, 1, torch.tensor(1.5).double())
    with pytest.raises(ConfigError, match="began from 1.5, of which fleet.mean\\(\\) gave 1,"):
        window.enter(call(window, 4, everywhere=8), ONE, 2, None)


def test_a_weight_of_one_term_is_no_division_by_the_passes() -> None:
    window = Window(list)
    for others, is_divided in ((ONE, False), (ONE / 2, True)):
        window.end_update()
        for task in (1, 2):
            window.enter(call(window, 4), others, task, None)
            window.enter(call(window, 4), ONE / 2, task, None)
        assert window.is_divided_twice() is is_divided


def test_nothing_counts() -> None:
    assert (divisor(0.0), divisor(3), divisor(torch.zeros(())).item()) == (1.0, 3, 1.0)
    assert are_equal(0.5, 0.5 + 1e-12)
    assert not are_equal(0.5, None)
    window = Window(list)
    window.enter(call(window, 0.0), ONE, 1, None)
    assert window.enter(call(window, 8.0), ONE, 2, None) == 2.0 / 8  # zeros fit any scale


def test_gradients_that_no_mean_has_brought_are_not_corrected() -> None:
    window = Window(lambda: [torch.ones(1)])
    window.enter(call(window, 4, everywhere=8), ONE, 1, None)
    with pytest.raises(ConfigError, match=r"gradients that fleet.mean\(\) did not bring"):
        window.enter(call(window, 2, everywhere=3), ONE, 2, None)


@pytest.mark.parametrize(
    ("calls", "is_right"),
    [
        ([(3, 8, 1), (5, 8, 2)], True),
        ([(3, 8, 1), (1, 2, 1), (5, 8, 2), (1, 2, 2)], True),  # two losses through one line
        ([(4, 4, 1), (4, 4, 1)], True),
        ([(0, 0, 1), (0, 0, 2)], True),
        ([(3, 3, 1), (5, 5, 2)], False),  # each its own count
        ([(5, 5, 1), (5, 5, 2)], False),
        ([(3, 16, 1), (5, 16, 2)], False),  # the count of two workers
    ],
)
def test_calls_count_what_update_count_said(calls: list[tuple[int, int, int]], is_right: bool) -> None:
    window = Window(list)
    for count, ahead, task in calls:
        made = call(window, count, ahead=2.0 * ahead)
        made.given = Ahead(float(count), float(ahead), "train.py:7", 0)
        window.enter(made, ONE, task, None)
    if is_right:
        window.check_given()
    else:
        with pytest.raises(ConfigError, match="train.py:7: the calls of fleet.mean"):
            window.check_given()


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_gradients_count_until_somebody_clears_them(value: float) -> None:
    """Rows that count nothing leave zeros, which are no cleared gradients; a strategy's views are new at each look."""
    flat = torch.zeros(4)
    window = Window(lambda: [flat[:1], flat[1:]])
    window.enter(call(window, 4, everywhere=8), ONE, 1, None)
    flat.add_(value)
    window.end_pass()
    assert window.has_gradients()
    assert window.has_gradients()
    if value:
        flat.data.zero_()  # bumps no version
    else:
        flat.zero_()
    assert not window.has_gradients()
