"""Metrics over all workers: each worker passes its own sums, and every worker gets the same result.

Workers that hold one copy of the model together (mp, pp) see the same rows and count once: with a pipeline the values
on the last stage, where the outputs are; other stages may pass zeros of the same shape. Workers along sep and cp hold
different tokens, and all of them count.

Without ``util``, the functions use ``fleet.util``.

Example:
    >>> fleet.metrics.acc(correct=90, total=100)
    0.9
"""

from __future__ import annotations

from fleet.metrics.click_metrics import (
    StatAuc,
    StatCalibration,
    StatGauc,
    StatLogLoss,
    StatNormalizedEntropy,
    StatWindowedAuc,
)
from fleet.metrics.ranking_metrics import StatNdcg, StatRecall
from fleet.metrics.reductions import acc, auc, mae, max, min, mse, rmse, sum

__all__ = [
    "StatAuc",
    "StatCalibration",
    "StatGauc",
    "StatLogLoss",
    "StatNdcg",
    "StatNormalizedEntropy",
    "StatRecall",
    "StatWindowedAuc",
    "acc",
    "auc",
    "mae",
    "max",
    "min",
    "mse",
    "rmse",
    "sum",
]
