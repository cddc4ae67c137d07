"""Metrics over all workers: each worker passes its own sums, and every worker gets the same result.

Workers that hold one copy of the model together (mp, pp) see the same rows and count once: with a pipeline the values
on the last stage, where the outputs are; other stages may pass zeros of the same shape. Workers along sep and cp hold
different tokens, and all of them count.

Without ``util``, the functions use that of the running ``fleet``.

Example:
    >>> fleet.metrics.acc(correct=90, total=100)
    0.9
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleet._click_metrics import StatCalibration, StatGauc, StatNormalizedEntropy, StatWindowedAuc
from fleet._metric_values import area_under, checked_batch, host_array, reduced, util_of
from fleet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fleet.job.util import HostArray, UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "StatAuc",
    "StatCalibration",
    "StatGauc",
    "StatNormalizedEntropy",
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


def sum(input: Any, scope: None = None, util: UtilBase | None = None) -> HostArray:  # noqa: A001
    """Returns the sum of ``input`` over the workers, element by element, in its shape and dtype."""
    return reduced(util_of(util, scope), input)


def max(input: Any, scope: None = None, util: UtilBase | None = None) -> HostArray:  # noqa: A001
    """Returns the largest ``input`` over the workers, element by element, in its shape and dtype."""
    return reduced(util_of(util, scope), input, "max")


def min(input: Any, scope: None = None, util: UtilBase | None = None) -> HostArray:  # noqa: A001
    """Returns the smallest ``input`` over the workers, element by element, in its shape and dtype."""
    return reduced(util_of(util, scope), input, "min")


def acc(correct: Any, total: Any, scope: None = None, util: UtilBase | None = None) -> float:
    """Returns the accuracy: the sum of ``correct`` over the sum of ``total``; nan without samples."""
    return _ratio(correct, total, "correct", "total", util_of(util, scope))


def mae(abserr: Any, total_ins_num: Any, scope: None = None, util: UtilBase | None = None) -> float:
    """Returns the mean absolute error from each worker's sum of absolute errors and number of samples."""
    return _ratio(abserr, total_ins_num, "abserr", "total_ins_num", util_of(util, scope))


def mse(sqrerr: Any, total_ins_num: Any, scope: None = None, util: UtilBase | None = None) -> float:
    """Returns the mean squared error from each worker's sum of squared errors and number of samples."""
    return _ratio(sqrerr, total_ins_num, "sqrerr", "total_ins_num", util_of(util, scope))


def rmse(sqrerr: Any, total_ins_num: Any, scope: None = None, util: UtilBase | None = None) -> float:
    """Returns the root of the mean squared error from each worker's sum of squared errors and number of samples."""
    return math.sqrt(_ratio(sqrerr, total_ins_num, "sqrerr", "total_ins_num", util_of(util, scope)))


def auc(stat_pos: Any, stat_neg: Any, scope: None = None, util: UtilBase | None = None) -> float:
    """Returns the area under the ROC curve from histograms of the predictions of positive and negative samples.

    Bucket ``i`` counts samples whose predicted probability lies in the i-th of equal parts of [0, 1]. Within a bucket
    the curve is straight (trapezoids), as for ties. 0.5 when all workers together have no positive or no negative.

    Args:
        stat_pos: counts of positive samples, any shape, the same on every worker.
        stat_neg: counts of negative samples, as many.

    Raises:
        ConfigError: the numbers of buckets differ, or a count is negative.
    """
    chosen = util_of(util, scope)
    local_pos, local_neg = _flat(stat_pos, "stat_pos"), _flat(stat_neg, "stat_neg")
    if local_pos.size != local_neg.size:
        raise ConfigError(f"auc(): stat_pos has {local_pos.size} buckets and stat_neg {local_neg.size}.")
    pos, neg = np.asarray(reduced(chosen, local_pos)), np.asarray(reduced(chosen, local_neg))
    if pos.size and (pos.min() < 0 or neg.min() < 0):
        raise ConfigError("auc(): a bucket has a negative count.")
    return area_under(pos, neg)


class StatAuc:
    """Counts predictions into buckets batch by batch, and gives the AUC over all workers.

    Args:
        bins: number of equal parts of [0, 1]; predictions in one part count as ties.

    Example:
        >>> stat = StatAuc()
        >>> stat.update([0.9, 0.2], [1, 0])
        >>> stat.value()
        1.0
    """

    def __init__(self, bins: int = 4096) -> None:
        if type(bins) is not int or bins < 1:
            raise ConfigError(f"StatAuc(bins={bins!r}) takes an integer of at least 1.")
        self.bins = bins
        self.stat_pos: Array = np.zeros(bins, np.int64)
        self.stat_neg: Array = np.zeros(bins, np.int64)

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch.

        Args:
            pred: probability of the positive class, shape (N,) or (N, 1); or (N, 2), column 1 positive.
            label: N labels, 0 or 1.

        Raises:
            ConfigError: shapes that do not match, a prediction outside [0, 1], a label other than 0 and 1.
        """
        scores, labels = checked_batch("StatAuc.update", pred, label)
        buckets = np.minimum((scores * self.bins).astype(np.int64), self.bins - 1)
        positive = labels == 1
        self.stat_pos += np.bincount(buckets[positive], minlength=self.bins)
        self.stat_neg += np.bincount(buckets[~positive], minlength=self.bins)

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the AUC of everything counted so far on all workers; every worker must call it."""
        return auc(self.stat_pos, self.stat_neg, util=util)

    def reset(self) -> None:
        """Resets all counts."""
        self.stat_pos[:] = 0
        self.stat_neg[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's counts as tensors, for ``fleet.save``."""
        return {"stat_pos": torch.from_numpy(self.stat_pos.copy()), "stat_neg": torch.from_numpy(self.stat_neg.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads counts; raises CheckpointError when they were made with a different number of bins."""
        pos, neg = (np.array(host_array(state_dict[name]), np.int64) for name in ("stat_pos", "stat_neg"))
        if pos.shape != (self.bins,) or neg.shape != (self.bins,):
            raise CheckpointError(f"StatAuc(bins={self.bins}) cannot load counts of shape {pos.shape} and {neg.shape}.")
        self.stat_pos, self.stat_neg = pos, neg

    set_state_dict = load_state_dict


def _flat(value: Any, name: str) -> Array:
    array = np.asarray(host_array(value)).reshape(-1)
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"auc({name}): counts are numbers, got dtype {array.dtype}.")
    return array


def _ratio(part: Any, whole: Any, part_name: str, whole_name: str, util: UtilBase) -> float:
    """Each worker's values are summed in float64, then over the workers."""
    numerator = float(reduced(util, _total(part, part_name)))
    denominator = float(reduced(util, _total(whole, whole_name)))
    return numerator / denominator if denominator != 0.0 else math.nan


def _total(value: Any, name: str) -> HostArray:
    array = np.asarray(host_array(value))
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{name} is {value!r}; it takes numbers.")
    total: HostArray = array.sum(dtype=np.float64)
    return total
