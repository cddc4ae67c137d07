"""Sums, extremes, errors and the AUC over all workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet.common.host_array import host_array
from fleet.errors import ConfigError
from fleet.metrics.metric_values import area_under, reduced, util_of

if TYPE_CHECKING:
    from fleet.job.util import HostArray, UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]


def sum(input: Any, scope: None = None, util: UtilBase | None = None) -> HostArray:  # noqa: A001
    """Returns the sum of ``input`` over the workers, element by element, in its shape and dtype.

    Booleans are counted in int64, and bfloat16 gives float32, which numpy has. float16 is infinite beyond 65504.

    Raises:
        ConfigError: a sum of integers does not fit their dtype.
    """
    return reduced(util_of(util, scope), input)


def max(input: Any, scope: None = None, util: UtilBase | None = None) -> HostArray:  # noqa: A001
    """Returns the largest ``input`` over the workers by element, in its shape and dtype; bfloat16 in float32."""
    return reduced(util_of(util, scope), input, "max")


def min(input: Any, scope: None = None, util: UtilBase | None = None) -> HostArray:  # noqa: A001
    """Returns the smallest ``input`` over the workers by element, in its shape and dtype; bfloat16 in float32."""
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
    """Returns the root of the mean squared error from each worker's sum of squared errors and number of samples.

    Raises:
        ConfigError: the mean over all workers is negative.
    """
    mean = _ratio(sqrerr, total_ins_num, "sqrerr", "total_ins_num", util_of(util, scope))
    if mean < 0.0:
        raise ConfigError(f"rmse(): the mean squared error over all workers is {mean:g}; squares are never negative.")
    return math.sqrt(mean)


def auc(stat_pos: Any, stat_neg: Any, scope: None = None, util: UtilBase | None = None) -> float:
    """Returns the area under the ROC curve from histograms of the predictions of positive and negative samples.

    Bucket ``i`` counts samples whose predicted probability lies in the i-th of equal parts of [0, 1]. Within a bucket
    the curve is straight (trapezoids), as for ties. 0.5 when all workers together have no positive or no negative.

    Args:
        stat_pos: counts of positive samples, any shape, the same on every worker.
        stat_neg: counts of negative samples, as many.

    Raises:
        ConfigError: the numbers of buckets differ, or a count is negative or not finite.
    """
    chosen = util_of(util, scope)
    local_pos = _flat(stat_pos, "stat_pos")
    local_neg = _flat(stat_neg, "stat_neg")
    if local_pos.size != local_neg.size:
        raise ConfigError(f"auc(): stat_pos has {local_pos.size} buckets and stat_neg {local_neg.size}.")
    pos = np.asarray(reduced(chosen, local_pos))
    neg = np.asarray(reduced(chosen, local_neg))
    if not all(bool(((counts >= 0) & np.isfinite(counts)).all()) for counts in (pos, neg)):
        raise ConfigError("auc(): a bucket has a negative count, or one that is not finite.")
    return area_under(pos, neg)


def _flat(value: Any, name: str) -> Array:
    array = np.asarray(host_array(value)).reshape(-1)
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"auc({name}): counts are numbers, got dtype {array.dtype}.")
    return array


def _ratio(part: Any, whole: Any, part_name: str, whole_name: str, util: UtilBase) -> float:
    """Returns the quotient of two sums over the workers, in float64; nan where the second is 0."""
    numerator = float(reduced(util, _total(part, part_name)))
    denominator = float(reduced(util, _total(whole, whole_name)))
    return numerator / denominator if denominator != 0.0 else math.nan


def _total(value: Any, name: str) -> HostArray:
    array = np.asarray(host_array(value))
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{name} is {value!r}; it takes numbers.")
    total: HostArray = array.sum(dtype=np.float64)
    return total
