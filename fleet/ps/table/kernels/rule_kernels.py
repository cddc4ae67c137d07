# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Update rules as C functions: ``update(rows, n, order, gradients, stride, shows, column, width, state, params)``.

All arguments are int64. ``rows`` points to ``n`` row addresses (0 is skipped); row i takes the gradient at line
``order[i]`` of ``gradients`` (``stride`` floats a line) and columns ``column`` to ``column + width``; its state
starts at float ``state``. ``shows`` points to float32 or is 0. ``params`` points to what :func:`rule_parameters`
returns. The formulas stand in :mod:`fleet.ps.table.rules`.

A rule is compiled when the first table uses it; kernels call it by address.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fleet.ps.table.kernels.common import (
    UPDATE_ARGUMENTS,
    c_function,
    doubles,
    f32,
    f64,
    floats,
    i64,
    ints,
    kernel,
    none,
    small_part,
    words,
)
from fleet.ps.table.kernels.id_kernels import PIECE, sum_but_last
from fleet.ps.table.rules import Rule

# Where the numbers of a rule stand in the float64 array that its kernel reads.
RATE, BETA_1, BETA_2, EPSILON, WEIGHT_DECAY, INITIAL_G2SUM = 0, 1, 2, 3, 4, 5
LOWER, UPPER, SHOW_SCALE, NESTEROV, NUM_CORRECTIONS, CORRECTIONS = 6, 7, 8, 9, 10, 16
EPSILON_FIRST, SPAN = 11, 12  # SPAN: from one array of a row's state to the next, where a call updates a piece of them
# Adam's bias corrections stand ready for this many steps; later ones are computed per row.
CORRECTED_STEPS = 16384

_SIGNATURE = none(*UPDATE_ARGUMENTS)
# Sums over a row may be added in any order, or they would not be vectorised.
_SUMMING: dict[str, Any] = {"fastmath": {"reassoc", "nsz"}}


def rule_parameters(rule: Rule) -> npt.NDArray[np.float64]:
    """Returns the numbers that the rule's kernel reads."""
    adam = rule.name in ("adam", "shared_adam")
    params = np.zeros(CORRECTIONS + (2 * (CORRECTED_STEPS + 1) if adam else 0))
    params[RATE] = rule.get("learning_rate")
    params[BETA_1], params[BETA_2] = rule.get("momentum", rule.get("beta1")), rule.get("beta2")
    params[EPSILON], params[WEIGHT_DECAY] = rule.get("epsilon"), rule.get("weight_decay")
    params[INITIAL_G2SUM], params[SHOW_SCALE] = rule.get("initial_g2sum"), rule.get("show_scale")
    params[LOWER], params[UPPER] = rule.get("lower_bound", -np.inf), rule.get("upper_bound", np.inf)
    params[NESTEROV], params[EPSILON_FIRST] = rule.get("nesterov"), rule.get("epsilon_first")
    if adam:
        steps = np.arange(1, CORRECTED_STEPS + 1, dtype=np.float64)
        params[NUM_CORRECTIONS] = CORRECTED_STEPS
        params[CORRECTIONS + 2 :: 2] = 1.0 / (1.0 - rule["beta1"] ** steps)
        params[CORRECTIONS + 3 :: 2] = 1.0 / np.sqrt(1.0 - rule["beta2"] ** steps)
    return params


@small_part
def clamped(value, lower, upper):
    """Returns ``value`` inside the bounds; not-a-number stays."""
    value = lower if value < lower else value
    return upper if value > upper else value


@small_part
def show_of(shows, place, params):
    """Returns the divisor of a gradient: its shows, or 1 without shows or where scaling is off."""
    if shows == 0 or doubles(params)[SHOW_SCALE] == 0.0:
        return f32(1)
    show = floats(shows)[place]
    return show if show > f32(0) else f32(1)


@small_part
def correction_1(params, step):
    """Returns lr / (1 - beta1^step)."""
    p = doubles(params)
    if step <= p[NUM_CORRECTIONS]:
        return f32(p[RATE] * p[CORRECTIONS + 2 * i64(step)])
    return f32(p[RATE] / (1.0 - p[BETA_1] ** f64(step)))


@small_part
def correction_2(params, step):
    """Returns 1 / sqrt(1 - beta2^step)."""
    p = doubles(params)
    if step <= p[NUM_CORRECTIONS]:
        return f32(p[CORRECTIONS + 2 * i64(step) + 1])
    return f32(1.0 / math.sqrt(1.0 - p[BETA_2] ** f64(step)))


def _sgd(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, decay = f32(p[RATE]), f32(p[WEIGHT_DECAY])
    lower, upper = f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w = floats(row + 4 * column)
            g = floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            for j in range(width):
                w[j] = clamped(w[j] - lr * (g[j] + decay * w[j]), lower, upper)


@kernel
def sgd_by_mean(sources, count, n, divisor, piece, row, params):
    """Does what :func:`fleet.ps.table.kernels.id_kernels.push_mean` does by this rule, for 2 or more gradients.

    Each weight and gradient is read once. With a piece of the mean first and then the same piece of the weights, the
    processor waits for memory twice.
    """
    p = doubles(params)
    lr, decay = f32(p[RATE]), f32(p[WEIGHT_DECAY])
    lower, upper, scale, none_yet = f32(p[LOWER]), f32(p[UPPER]), f32(divisor), f32(0.0)
    for start in range(0, n, PIECE):
        size = min(PIECE, n - start)
        first = floats(sum_but_last(sources, count, start, size, piece))
        last, w = floats(words(sources)[count - 1] + 4 * start), floats(row + 4 * start)
        for j in range(size):
            g = ((none_yet + first[j]) + last[j]) / scale
            w[j] = clamped(w[j] - lr * (g + decay * w[j]), lower, upper)


def _momentum(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, decay, mu = f32(p[RATE]), f32(p[WEIGHT_DECAY]), f32(p[BETA_1])
    lower, upper, nesterov = f32(p[LOWER]), f32(p[UPPER]), p[NESTEROV] != 0.0
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, m = floats(row + 4 * column), floats(row + 4 * state)
            g = floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            for j in range(width):
                d = g[j] + decay * w[j]
                v = mu * m[j] + d
                m[j] = v
                w[j] = clamped(w[j] - lr * (d + mu * v if nesterov else v), lower, upper)


def _adagrad(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, decay, eps = f32(p[RATE]), f32(p[WEIGHT_DECAY]), f32(p[EPSILON])
    lower, upper = f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, s = floats(row + 4 * column), floats(row + 4 * state)
            g = floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            for j in range(width):
                d = g[j] + decay * w[j]
                v = s[j] + d * d
                s[j] = v
                w[j] = clamped(w[j] - lr * d / (math.sqrt(v) + eps), lower, upper)


def _rowwise_adagrad(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, decay, eps = f32(p[RATE]), f32(p[WEIGHT_DECAY]), f32(p[EPSILON])
    lower, upper = f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, s = floats(row + 4 * column), floats(row + 4 * state)
            g = floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            total = f32(0)
            for j in range(width):
                d = g[j] + decay * w[j]
                total += d * d
            s[0] += total / f32(width)
            rate = lr / (math.sqrt(s[0]) + eps)
            for j in range(width):
                w[j] = clamped(w[j] - rate * (g[j] + decay * w[j]), lower, upper)


def _shared_adagrad(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, g0, lower, upper = f32(p[RATE]), f32(p[INITIAL_G2SUM]), f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, s, place = floats(row + 4 * column), floats(row + 4 * state), i64(ints(order)[i])
            g, show = floats(gradients + 4 * (place * stride + column)), show_of(shows, place, params)
            rate, total = lr * math.sqrt(g0 / (g0 + s[0])), f32(0)
            for j in range(width):
                d = g[j] / show
                total += d * d
                w[j] = clamped(w[j] - rate * d, lower, upper)
            s[0] += total / f32(width)


def _std_adagrad(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, g0, lower, upper = f32(p[RATE]), f32(p[INITIAL_G2SUM]), f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, s, place = floats(row + 4 * column), floats(row + 4 * state), i64(ints(order)[i])
            g, show = floats(gradients + 4 * (place * stride + column)), show_of(shows, place, params)
            for j in range(width):
                d = g[j] / show
                w[j] = clamped(w[j] - lr * d * math.sqrt(g0 / (g0 + s[j])), lower, upper)
                s[j] += d * d


def _adagrad_v2(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    lr, lower, upper = f32(p[RATE]), f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, s, place = floats(row + 4 * column), floats(row + 4 * state), i64(ints(order)[i])
            g, show = floats(gradients + 4 * (place * stride + column)), show_of(shows, place, params)
            total = f32(0)
            for j in range(width):
                d = g[j] / show
                total += d * d
            s[0] += total / f32(width)
            rate = lr / math.sqrt(s[0]) if s[0] > f32(0) else f32(0)
            for j in range(width):
                w[j] = clamped(w[j] - rate * (g[j] / show), lower, upper)


def _adam(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    decay, eps, b1, b2 = f32(p[WEIGHT_DECAY]), f32(p[EPSILON]), f32(p[BETA_1]), f32(p[BETA_2])
    c1, c2, lower, upper = f32(1.0 - p[BETA_1]), f32(1.0 - p[BETA_2]), f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            span, start = (width, i64(0)) if p[SPAN] == 0.0 else (i64(p[SPAN]), column)
            w, m, v = floats(row + 4 * column), floats(row + 4 * state), floats(row + 4 * (state + span))
            g = floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            # Of a row that is updated piece by piece, the first piece counts the step.
            if start == 0:
                v[span] += f32(1)
            step = v[span - start]
            rate, root = correction_1(params, step), correction_2(params, step)
            floor = eps * root if p[EPSILON_FIRST] != 0.0 else eps
            for j in range(width):
                d = g[j] + decay * w[j]
                m[j] = b1 * m[j] + c1 * d
                v[j] = b2 * v[j] + c2 * d * d
                w[j] = clamped(w[j] - rate * m[j] / (math.sqrt(v[j]) * root + floor), lower, upper)


def _shared_adam(rows, n, order, gradients, stride, shows, column, width, state, params):
    p = doubles(params)
    eps, b1, b2 = f32(p[EPSILON]), f32(p[BETA_1]), f32(p[BETA_2])
    c1, c2, lower, upper = f32(1.0 - p[BETA_1]), f32(1.0 - p[BETA_2]), f32(p[LOWER]), f32(p[UPPER])
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, s = floats(row + 4 * column), floats(row + 4 * state)
            g = floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            s[2] += f32(1)
            rate, root = correction_1(params, s[2]), correction_2(params, s[2])
            floor = eps * root
            old_m, old_v, sum_m, sum_v = b1 * s[0], b2 * s[1], f32(0), f32(0)
            for j in range(width):
                m, v = old_m + c1 * g[j], old_v + c2 * g[j] * g[j]
                sum_m += m
                sum_v += v
                w[j] = clamped(w[j] - rate * m / (math.sqrt(v) * root + floor), lower, upper)
            s[0] = sum_m / f32(width)
            s[1] = sum_v / f32(width)


def _sum(rows, n, order, gradients, stride, shows, column, width, state, params):
    for i in range(n):
        row = words(rows)[i]
        if row != 0:
            w, g = floats(row + 4 * column), floats(gradients + 4 * (i64(ints(order)[i]) * stride + column))
            for j in range(width):
                w[j] += g[j]


# By the name of the rule, which is the name of its function.
_PLAIN_RULES = (_sgd, _momentum, _adagrad, _std_adagrad, _adam, _sum)
_SUMMING_RULES = (_rowwise_adagrad, _shared_adagrad, _adagrad_v2, _shared_adam)
_FUNCTIONS = {function.__name__.removeprefix("_"): function for function in (*_PLAIN_RULES, *_SUMMING_RULES)}


@functools.cache
def _compiled(name: str) -> Any:
    function = _FUNCTIONS[name]
    return c_function(_SIGNATURE, **(_SUMMING if function in _SUMMING_RULES else {}))(function)


def update_function(name: str) -> Callable[..., None]:
    """Returns the rule's compiled function in a form that Python can call, with ten integers."""
    return cast(Callable[..., None], _compiled(name).ctypes)


def update_address(rule: Rule) -> int:
    """Returns the address of the rule's compiled function, which lives as long as the process."""
    return int(_compiled(rule.name).address)
