"""The learning rate over a run."""

from __future__ import annotations

import pytest

from tests.examples.gpt.example import example_module

warmup_cosine = example_module("schedule").warmup_cosine


def test_it_rises_for_a_tenth_and_falls_to_nearly_zero() -> None:
    factors = [warmup_cosine(step, 40) for step in range(40)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert 0 < factors[-1] < 0.01
