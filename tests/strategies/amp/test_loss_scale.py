"""amp: the loss scale grows and shrinks as Paddle's update_loss_scaling does (A.2)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import CheckpointError
from fleet.strategies.amp.amp import AmpConfig
from fleet.strategies.amp.amp_optimizer import LossScale


def scale_of(**keys: Any) -> LossScale:
    """Returns a scale in use."""
    return LossScale(AmpConfig(**keys), enabled=True)


def test_the_table_of_the_state_machine() -> None:
    """A.2: written out by hand: steps (True is finite) and the scale, good and bad counters after each."""
    scale = scale_of(
        init_loss_scaling=8.0, incr_every_n_steps=3, decr_every_n_nan_or_inf=2, incr_ratio=4.0, decr_ratio=0.5
    )
    table = [
        (True, 8.0, 1, 0),
        (True, 8.0, 2, 0),
        (True, 32.0, 0, 0),  # the third finite step in a row
        (True, 32.0, 1, 0),
        (False, 32.0, 0, 1),  # finite steps start again
        (True, 32.0, 1, 0),  # and so do steps with an inf
        (False, 32.0, 0, 1),
        (False, 16.0, 0, 0),  # the second since the last finite one
        (False, 16.0, 0, 1),
        (False, 8.0, 0, 0),
        (True, 8.0, 1, 0),
        (True, 8.0, 2, 0),
        (False, 8.0, 0, 1),
        (True, 8.0, 1, 0),
        (True, 8.0, 2, 0),
        (True, 32.0, 0, 0),
    ]
    for row, (finite, *after) in enumerate(table):
        scale.update(finite=finite)
        assert [scale.scale, scale.good, scale.bad] == after, row


def test_defaults_are_those_of_paddle() -> None:
    """A.2: 32768, grows by 2 after 1000 finite steps, shrinks by 0.8 at the second overflow."""
    scale = scale_of()
    for _ in range(999):
        scale.update(finite=True)
    assert scale.current() == 32768.0
    scale.update(finite=True)
    assert scale.current() == 65536.0
    scale.update(finite=False)
    assert scale.current() == 65536.0
    scale.update(finite=False)
    assert scale.current() == 65536.0 * 0.8


def test_the_scale_has_a_floor_and_a_ceiling() -> None:
    """A.2: not below 1; a scale that float32 cannot hold is not taken, and the counter starts again."""
    low = scale_of(init_loss_scaling=1.5, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    low.update(finite=False)
    assert low.scale == 1.0
    low.update(finite=False)
    assert low.scale == 1.0
    high = scale_of(init_loss_scaling=2.0**127, incr_every_n_steps=2)
    for _ in range(2):
        high.update(finite=True)
    assert high.scale == 2.0**127
    assert high.good == 0


def test_a_static_scale_stays() -> None:
    """A.2 use_dynamic_loss_scaling: False keeps init_loss_scaling whatever happens."""
    scale = scale_of(
        use_dynamic_loss_scaling=False, init_loss_scaling=128.0, incr_every_n_steps=1, decr_every_n_nan_or_inf=1
    )
    for finite in (True, False, False, True):
        scale.update(finite=finite)
        assert scale.state_dict() == {"scale": 128.0, "good": 0, "bad": 0}


def test_without_scaling_the_factor_is_1() -> None:
    """A.3: bfloat16 is not scaled, and an explicit scaler's scale is the one that is reported."""
    scale = LossScale(AmpConfig(), enabled=False)
    scale.update(finite=False)
    scale.load_state_dict({"scale": 4.0, "good": 1, "bad": 1})
    assert scale.factor == scale.current() == 1.0
    taken = scale_of()
    taken.give_way(torch.amp.GradScaler("cpu", init_scale=16.0))
    assert taken.factor == 1.0
    assert taken.current() == 16.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), max_size=60),
    st.floats(1.0, 1e6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.floats(1.01, 8.0),
    st.floats(0.01, 0.99),
)
def test_follows_the_model(
    steps: list[bool], start: float, incr_every: int, decr_every: int, incr: float, decr: float
) -> None:
    """A.2: the scale after any history is what its runs of finite steps and of overflows say."""
    scale = scale_of(
        init_loss_scaling=start, incr_every_n_steps=incr_every, decr_every_n_nan_or_inf=decr_every, incr_ratio=incr,
        decr_ratio=decr,
    )  # fmt: skip
    expected, run = start, 0
    for index, finite in enumerate(steps):
        run = run + 1 if index and steps[index - 1] == finite else 1
        if finite and run % incr_every == 0:
            expected *= incr
        if not finite and run % decr_every == 0:
            expected = max(1.0, expected * decr)
        scale.update(finite=finite)
        assert scale.scale == expected


def test_resumes_exactly_and_refuses_nonsense() -> None:
    """A.2: scale and both counters survive state_dict; a damaged entry is named."""
    first, second = scale_of(incr_every_n_steps=3), scale_of(incr_every_n_steps=3)
    history = [True, True, False, True, True, True, False, False, True]
    for finite in history[:5]:
        first.update(finite=finite)
    second.load_state_dict(first.state_dict())
    for finite in history[5:]:
        first.update(finite=finite)
        second.update(finite=finite)
        assert first.state_dict() == second.state_dict()
    for wrong in ({}, {"scale": "x", "good": 0, "bad": 0}, {"scale": 0.0, "good": 0, "bad": 0},
                  {"scale": float("inf"), "good": 0, "bad": 0}):  # fmt: skip
        before = second.state_dict()
        with pytest.raises(CheckpointError, match="scale"):
            second.load_state_dict(wrong)
        assert second.state_dict() == before


def test_a_round_of_several_optimizers_is_one_step() -> None:
    """Issue 9, 1.5: the counters move once when all have stepped, or when one steps again."""
    scale = scale_of(init_loss_scaling=8.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1, incr_ratio=2.0)
    seen = []
    for optimizer, finite in [(1, True), (2, True), (2, True), (1, True), (1, False), (2, True), (2, True), (2, True)]:
        scale.count(optimizer, finite=finite, num_optimizers=2)
        seen.append((scale.scale, scale.good))
    assert seen[:4] == [(8.0, 0), (8.0, 1), (8.0, 1), (16.0, 0)]
    assert seen[4:] == [(16.0, 0), (pytest.approx(12.8), 0), (pytest.approx(12.8), 0), (pytest.approx(12.8), 1)]
    alone = scale_of(incr_every_n_steps=1)
    alone.count(1, finite=True, num_optimizers=1)
    assert alone.scale == 65536.0
