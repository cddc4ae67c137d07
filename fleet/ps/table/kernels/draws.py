# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Initial weights as C functions ``draw(numbers, key, column)``: a pure function of (seed, key, column).

``numbers`` is the address of the table's floats. Twins: :func:`fleet.ps.table.reference.initial_values`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from fleet.ps.table.kernels.common import (
    DRAW_ARGUMENTS,
    INIT_A,
    INIT_B,
    MIX_2,
    SEED_BASE,
    c_function,
    doubles,
    f64,
    i64,
    mix,
    part,
    u64,
    words,
)
from fleet.ps.table.reference import GOLDEN

_TWO_PI = 2.0 * math.pi


@part(f64(i64, i64, i64, i64))
def uniform_of(numbers, key, column, draw):
    """Returns a number in [0, 1) from a hash of (seed, key, column, draw)."""
    base = mix(i64(u64(key) ^ u64(words(numbers)[SEED_BASE])))
    counter = u64(column + 1) * u64(GOLDEN) + u64(draw) * u64(MIX_2)
    return f64(i64(mix(i64(base + counter)) >> u64(11))) * 2.0**-53


def _constant(numbers, key, column):
    return doubles(numbers)[INIT_A]


def _uniform(numbers, key, column):
    a, b = doubles(numbers)[INIT_A], doubles(numbers)[INIT_B]
    return a + (b - a) * uniform_of(numbers, key, column, i64(0))


def _normal(numbers, key, column):
    u1, u2 = uniform_of(numbers, key, column, i64(0)), uniform_of(numbers, key, column, i64(1))
    value = math.sqrt(-2.0 * math.log(1.0 - u1)) * math.cos(_TWO_PI * u2)
    return doubles(numbers)[INIT_A] + doubles(numbers)[INIT_B] * value


def _truncated_normal(numbers, key, column):
    draw, value = i64(0), 3.0
    while abs(value) > 2.0:
        u1, u2 = uniform_of(numbers, key, column, draw), uniform_of(numbers, key, column, draw + 1)
        value = math.sqrt(-2.0 * math.log(1.0 - u1)) * math.cos(_TWO_PI * u2)
        draw += 2
    return doubles(numbers)[INIT_A] + doubles(numbers)[INIT_B] * value


_DRAWS: tuple[Callable[..., Any], ...] = (_constant, _uniform, _normal, _truncated_normal)


@functools.cache
def _compiled(kind: int) -> Any:
    return c_function(f64(*DRAW_ARGUMENTS))(_DRAWS[kind])


def draw_address(kind: int) -> int:
    """Returns the address of the compiled function of an initializer's kind."""
    return int(_compiled(kind).address)
