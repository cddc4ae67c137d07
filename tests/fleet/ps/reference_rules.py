"""The oracle of the update rules in numpy: rows of a sparse table, and a dense table.

Each function changes ``w`` [n, width] and ``state`` [n, state_width] in place, in float32, in the order of
operations of its kernel. Formulas: :mod:`fleet.ps.table.rules`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fleet.ps.table.dense_table import DenseTable
from fleet.ps.table.layout import Float32s
from fleet.ps.table.rules import Rule

f32 = np.float32


def update_rows(rule: Rule, w: Float32s, state: Float32s, g: Float32s, shows: Float32s | None) -> None:
    """Applies ``rule`` to rows ``w`` with their ``state``, gradients ``g`` and shows (``None`` is 1 each)."""
    if rule.get("weight_decay"):
        g = g + f32(rule["weight_decay"]) * w
    if rule.get("show_scale") and shows is not None:
        g = g / np.where(shows > 0, shows, f32(1)).astype(np.float32)[:, None]
    _UPDATES[rule.name](rule, w, state, g)
    if "lower_bound" in rule.hyper:
        np.minimum(np.maximum(w, f32(rule["lower_bound"]), out=w), f32(rule["upper_bound"]), out=w)


def _sgd(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    w -= f32(rule["learning_rate"]) * g


def _momentum(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    mu = f32(rule["momentum"])
    state *= mu
    state += g
    w -= f32(rule["learning_rate"]) * (g + mu * state if rule["nesterov"] else state)


def _adagrad(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    state += g * g
    w -= f32(rule["learning_rate"]) * g / (np.sqrt(state) + f32(rule["epsilon"]))


def _rowwise_adagrad(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    state[:, 0] += np.mean(g * g, axis=1, dtype=np.float32)
    w -= (f32(rule["learning_rate"]) / (np.sqrt(state) + f32(rule["epsilon"]))) * g


def _shared_adagrad(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    g0 = f32(rule["initial_g2sum"])
    w -= (f32(rule["learning_rate"]) * np.sqrt(g0 / (g0 + state))) * g
    state[:, 0] += np.mean(g * g, axis=1, dtype=np.float32)


def _std_adagrad(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    g0 = f32(rule["initial_g2sum"])
    w -= f32(rule["learning_rate"]) * g * np.sqrt(g0 / (g0 + state))
    state += g * g


def _adagrad_v2(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    state[:, 0] += np.mean(g * g, axis=1, dtype=np.float32)
    safe = np.where(state > 0, state, f32(1))
    w -= np.where(state > 0, f32(rule["learning_rate"]) / np.sqrt(safe), f32(0)) * g


def bias_corrections(rule: Rule, steps: Float32s) -> tuple[Float32s, Float32s]:
    """Returns lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) of steps t, worked out in float64."""
    t = steps.astype(np.float64)
    step_size = rule["learning_rate"] / (1.0 - rule["beta1"] ** t)
    return step_size.astype(np.float32), (1.0 / np.sqrt(1.0 - rule["beta2"] ** t)).astype(np.float32)


def _adam(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    width = w.shape[1]
    m, v = state[:, :width], state[:, width : 2 * width]
    state[:, -1] += f32(1)
    step_size, root = bias_corrections(rule, state[:, -1])
    b1, b2 = f32(rule["beta1"]), f32(rule["beta2"])
    m[:] = b1 * m + f32(1.0 - rule["beta1"]) * g
    v[:] = b2 * v + f32(1.0 - rule["beta2"]) * g * g
    epsilon = f32(rule["epsilon"]) * (root[:, None] if rule["epsilon_first"] else f32(1))
    w -= step_size[:, None] * m / (np.sqrt(v) * root[:, None] + epsilon)


def _shared_adam(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    state[:, 2] += f32(1)
    step_size, root = bias_corrections(rule, state[:, 2])
    m = f32(rule["beta1"]) * state[:, :1] + f32(1.0 - rule["beta1"]) * g
    v = f32(rule["beta2"]) * state[:, 1:2] + f32(1.0 - rule["beta2"]) * g * g
    w -= step_size[:, None] * m / (np.sqrt(v) * root[:, None] + f32(rule["epsilon"]) * root[:, None])
    state[:, 0] = np.mean(m, axis=1, dtype=np.float32)
    state[:, 1] = np.mean(v, axis=1, dtype=np.float32)


def _sum(rule: Rule, w: Float32s, state: Float32s, g: Float32s) -> None:
    w += g


_UPDATES: dict[str, Callable[[Rule, Float32s, Float32s, Float32s], None]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "shared_adagrad": _shared_adagrad,
    "std_adagrad": _std_adagrad,
    "adagrad_v2": _adagrad_v2,
    "adam": _adam,
    "shared_adam": _shared_adam,
    "sum": _sum,
}


class ReferenceDenseTable(DenseTable):
    """A dense table whose rule runs in numpy."""

    def _push_by_kernel(self, gradient: Float32s) -> None:
        update_rows(self._rule, self._values[None], self._state[None], gradient[None], None)
