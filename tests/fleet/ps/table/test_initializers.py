"""Tests of what an Initializer takes."""

import math

import pytest

from fleet.errors import ConfigError
from fleet.ps import Initializer

WRONG = [
    ("constant", 1e39, 0.0),
    ("constant", -math.inf, 0.0),
    ("uniform", -1e39, 1.0),
    ("uniform", 0.0, math.nan),
    ("uniform", math.nan, 0.0),
    ("uniform", 0, 10**400),
    ("normal", 0.0, 1e38),
    ("truncated_normal", 3e38, 1e38),
]


@pytest.mark.parametrize(("kind", "a", "b"), WRONG)
def test_weights_that_could_begin_as_infinite_are_refused(kind, a, b):
    with pytest.raises(ConfigError, match="they must be finite in float32"):
        Initializer(kind, a, b)


def test_a_constant_takes_one_value():
    with pytest.raises(ConfigError, match=r"initializer 'constant' takes one value, got 0.5 and 7"):
        Initializer("constant", 0.5, 7)
    for values in ((0.5,), (0.5, 0.0), (0.5, 0.5)):  # as saves have them
        Initializer("constant", *values)
