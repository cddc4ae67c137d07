"""Metrics of click models over all workers: AUC (whole, by user, in a window), log loss, calibration."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleet.common.host_array import host_array
from fleet.common.whole_numbers import count_of
from fleet.errors import CheckpointError, ConfigError
from fleet.metrics.counted_cells import CountedCells, auc_of, gauc_of
from fleet.metrics.metric_values import (
    area_under,
    check_state,
    checked_batch,
    ids_of,
    places_of,
    reduced,
    util_of,
)
from fleet.metrics.reductions import auc
from fleet.metrics.worker_sums import WorkerSums

if TYPE_CHECKING:
    from fleet.job.util import UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]

_LEAST_EPSILON = 2.0**-53


class StatAuc:
    """The AUC of everything counted on all workers; 0.5 without a positive or without a negative.

    With ``bins``, this worker keeps 16 bytes a bin. With ``None`` the result is exact, as if one process had seen all
    samples; this worker keeps 24 bytes for each different prediction, and ``value()`` exchanges at most about two
    million of them at a time.

    Args:
        bins: number of equal parts of [0, 1]; predictions in one part count as ties. ``None`` compares predictions as
            float32. Both take probabilities alone: of scores give the sigmoid.

    Example:
        >>> stat = fleet.metrics.StatAuc()
        >>> stat.update([0.9, 0.2], [1, 0])
        >>> stat.value()
        1.0
    """

    def __init__(self, bins: int | None = 4096) -> None:
        self.bins = _bins_or_none(self, bins)
        self.stat_pos: Array = np.zeros(self.bins or 0, np.int64)
        self.stat_neg: Array = np.zeros(self.bins or 0, np.int64)
        self._cells = CountedCells(num_keys=1)

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch.

        Args:
            pred: probability of the positive class, shape (N,) or (N, 1); or (N, 2), column 1 positive.
            label: N labels, 0 or 1.

        Raises:
            ConfigError: shapes that do not match, what is no real number, a prediction outside [0, 1], a label other
                than 0 and 1.
        """
        scores, labels = checked_batch("StatAuc.update", pred, label)
        places = places_of(scores, self.bins)
        positive = labels == 1
        if self.bins is None:
            self._cells.add(places, positive)
            return
        self.stat_pos += np.bincount(places[positive], minlength=self.bins)
        self.stat_neg += np.bincount(places[~positive], minlength=self.bins)

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the AUC of everything counted so far on all workers; every worker must call it."""
        if self.bins is None:
            return auc_of(self._cells.merged(), util_of(util))
        return auc(self.stat_pos, self.stat_neg, util=util)

    def reset(self) -> None:
        """Resets all counts."""
        self.stat_pos[:] = 0
        self.stat_neg[:] = 0
        self._cells.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's counts as tensors, for ``fleet.save``."""
        if self.bins is None:
            return self._cells.state(self, None)
        # Copies: from_numpy() shares memory, and later batches would change a state that is being saved.
        return {"stat_pos": torch.from_numpy(self.stat_pos.copy()), "stat_neg": torch.from_numpy(self.stat_neg.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads counts; raises CheckpointError when they were made with a different number of bins."""
        if self.bins is None and "stat_pos" in state_dict:
            raise CheckpointError(f"StatAuc(bins=None) cannot load counts of {len(state_dict['stat_pos'])} bins.")
        if self.bins is None or "cells" in state_dict:  # of bins=None: refused there, where this one has bins
            self._cells.load(self, state_dict, self.bins)
            return
        check_state(self, state_dict, "stat_pos", "stat_neg")
        pos, neg = (np.array(host_array(state_dict[name]), np.int64) for name in ("stat_pos", "stat_neg"))
        if pos.shape != (self.bins,) or neg.shape != (self.bins,):
            raise CheckpointError(f"StatAuc(bins={self.bins}) cannot load counts of shape {pos.shape} and {neg.shape}.")
        self.stat_pos = pos
        self.stat_neg = neg

    set_state_dict = load_state_dict


class StatGauc:
    """The AUC within each user, averaged over users by their impressions (group AUC).

    A user's samples may be on several workers: they are brought together by ``value()``, and the result is exact, as
    if one process had seen all of them. Users without a positive or without a negative sample have no AUC and do not
    count.

    This worker keeps 32 bytes for each pair of a user and a prediction that it has seen, so at most 32 bytes a sample;
    with ``bins``, at most 32 bytes times users times bins. ``value()`` exchanges about a million pairs at a time.

    Args:
        bins: predictions are rounded down to so many equal parts of [0, 1], and those in one part count as ties;
            ``None`` compares them as float32.

    Example:
        >>> stat = fleet.metrics.StatGauc()
        >>> stat.update(user=[7, 7, 8, 8], pred=[0.9, 0.2, 0.3, 0.6], label=[1, 0, 1, 0])
        >>> stat.value()
        0.5
    """

    def __init__(self, bins: int | None = None) -> None:
        self.bins = _bins_or_none(self, bins)
        self._cells = CountedCells(num_keys=2)

    def reset(self) -> None:
        """Forgets all samples."""
        self._cells.clear()

    def update(self, user: Any, pred: Any, label: Any) -> None:
        """Counts one batch.

        Args:
            user: N ids, integers of 64 bits at most.
            pred: probability of the positive class, shape (N,) or (N, 1); or (N, 2), column 1 positive.
            label: N labels, 0 or 1.

        Raises:
            ConfigError: shapes that do not match, ids that are no integers, a prediction outside [0, 1], a label other
                than 0 and 1.
        """
        scores, labels = checked_batch("StatGauc.update", pred, label)
        users = ids_of("StatGauc.update(user)", user).reshape(-1)
        if users.size != scores.size:
            raise ConfigError(f"StatGauc.update(): {users.size} users and {scores.size} predictions.")
        self._cells.add(users, places_of(scores, self.bins), labels == 1)

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the GAUC of everything counted so far on all workers, 0.5 where no user has both classes.

        Every worker must call it.
        """
        return gauc_of(self._cells.merged(), util_of(util))

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's samples as tensors, for ``fleet.save`` and ``fleet.checkpoint``."""
        return self._cells.state(self, self.bins)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads samples; raises CheckpointError when they were made with a different number of bins."""
        self._cells.load(self, state_dict, self.bins)

    set_state_dict = load_state_dict


class StatLogLoss(WorkerSums):
    """The mean log loss (binary cross-entropy); nan without samples.

    Args:
        epsilon: least distance of predictions from 0 and 1, where the log loss has no bound; 2**-53 or more.

    Example:
        >>> stat = fleet.metrics.StatLogLoss()
        >>> stat.update([0.5, 0.5], [1, 0])
        >>> round(stat.value(), 4)
        0.6931
    """

    def __init__(self, epsilon: float = 1e-7) -> None:
        if not isinstance(epsilon, float) or not _LEAST_EPSILON <= epsilon < 0.5:
            raise ConfigError(
                f"{type(self).__name__}(epsilon={epsilon!r}) takes a number from 2**-53 to below 0.5: less than 2**-53 "
                f"({_LEAST_EPSILON:.3g}) beside 1 is lost in float64."
            )
        super().__init__(3, f"epsilon={float(epsilon)}", "epsilon=1e-07")  # samples, positives, losses
        self.epsilon = epsilon

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch, as :meth:`fleet.metrics.StatAuc.update` takes it."""
        scores, labels = checked_batch(f"{type(self).__name__}.update", pred, label)
        kept = np.clip(scores, self.epsilon, 1.0 - self.epsilon)
        loss = -np.log(np.where(labels == 1, kept, 1.0 - kept)).sum()
        self.sums += (labels.size, (labels == 1).sum(), loss)

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the mean over all workers; every worker must call it."""
        count, _, loss = self.totals(util)
        return float(loss / count) if count else math.nan


class StatNormalizedEntropy(StatLogLoss):
    """The mean log loss over the entropy of the average click rate: below 1 is better than predicting the average.

    Args:
        epsilon: least distance of predictions from 0 and 1, where the log loss has no bound; 2**-53 or more.

    Example:
        >>> stat = fleet.metrics.StatNormalizedEntropy()
        >>> stat.update([0.5, 0.5], [1, 0])
        >>> stat.value()
        1.0
    """

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the quotient over all workers, nan without a positive or a negative; every worker must call it."""
        count, positive, loss = map(float, self.totals(util))
        rate = positive / count if count else 0.0
        if not 0.0 < rate < 1.0:
            return math.nan
        return loss / count / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


class StatCalibration(WorkerSums):
    """The sum of the predictions over the number of positives: 1 is calibrated, above 1 predicts too much.

    Args:
        bins: number of equal parts of [0, 1] for :meth:`curve`; 24 bytes each.

    Example:
        >>> stat = fleet.metrics.StatCalibration()
        >>> stat.update([0.75, 0.75], [1, 0])
        >>> stat.value()
        1.5
    """

    def __init__(self, bins: int = 1) -> None:
        self.bins = _checked_count(self, "bins", bins)
        # Samples of each part, positives of each, predictions of each.
        super().__init__(3 * self.bins, f"bins={self.bins}", "bins=1")

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch, as :meth:`fleet.metrics.StatAuc.update` takes it."""
        scores, labels = checked_batch("StatCalibration.update", pred, label)
        # An edge belongs to the part below it, as in scikit-learn's calibration_curve.
        parts = np.searchsorted(np.linspace(0.0, 1.0, self.bins + 1)[1:-1], scores)
        weights = (None, labels == 1, scores)
        self.sums += np.concatenate([np.bincount(parts, weight, minlength=self.bins) for weight in weights])

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the quotient over all workers, nan without a positive; every worker must call it."""
        _, positive, predicted = self.totals(util).reshape(3, self.bins).sum(axis=1)
        return float(predicted / positive) if positive else math.nan

    def curve(self, util: UtilBase | None = None) -> tuple[Array, Array]:
        """Returns the rate of positives and the mean prediction of each part of [0, 1] that has samples.

        Every worker must call it.

        Returns:
            Two float64 arrays, from the lowest part up, as ``sklearn.calibration.calibration_curve`` gives them.
        """
        totals = self.totals(util).reshape(3, self.bins)
        count, positive, predicted = totals[:, totals[0] > 0]
        return positive / count, predicted / count


class StatWindowedAuc:
    """The AUC of the last batches of each worker, which follows a model that changes.

    This worker keeps 4 bytes for each sample of the window.

    Args:
        window: number of batches, that is, of calls of ``update()``.
        bins: number of equal parts of [0, 1]; predictions in one part count as ties.

    Example:
        >>> stat = fleet.metrics.StatWindowedAuc(window=1)
        >>> stat.update([0.1, 0.9], [1, 0])
        >>> stat.update([0.9, 0.1], [1, 0])
        >>> stat.value()
        1.0
    """

    def __init__(self, window: int, bins: int = 4096) -> None:
        self.window = _checked_count(self, "window", window)
        self.bins = _checked_count(self, "bins", bins)
        if self.bins > 1 << 30:
            raise ConfigError(f"StatWindowedAuc(bins={bins!r}): at most {1 << 30}.")
        self.reset()

    def reset(self) -> None:
        """Forgets all batches."""
        self._batches: deque[Array] = deque()  # of each sample twice its part of [0, 1], and 1 more for a positive
        self._counts: Array = np.zeros(2 * self.bins, np.int64)

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch, as :meth:`fleet.metrics.StatAuc.update` takes it; the oldest leaves a full window."""
        scores, labels = checked_batch("StatWindowedAuc.update", pred, label)
        self._append((2 * places_of(scores, self.bins) + (labels == 1)).astype(np.uint32))

    def _append(self, codes: Array) -> None:
        self._batches.append(codes)
        np.add.at(self._counts, codes, 1)
        if len(self._batches) > self.window:
            np.subtract.at(self._counts, self._batches.popleft(), 1)

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the AUC over all workers, 0.5 without a positive or a negative; every worker must call it."""
        counts = np.asarray(reduced(util_of(util), self._counts))
        return area_under(counts[1::2], counts[0::2])

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's batches as tensors, for ``fleet.save`` and ``fleet.checkpoint``."""
        sizes = [len(batch) for batch in self._batches]
        codes = np.concatenate([*self._batches, np.zeros(0, np.uint32)]).astype(np.int64)
        return {"bins": self.bins, "sizes": torch.tensor(sizes, dtype=torch.int64), "codes": torch.from_numpy(codes)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads batches, the last of them into a shorter window.

        Raises CheckpointError when they were made with a different number of bins.
        """
        check_state(self, state_dict, "bins", "sizes", "codes")
        sizes, codes = (np.array(host_array(state_dict[name]), np.int64) for name in ("sizes", "codes"))
        fits = sizes.ndim == codes.ndim == 1 and int(sizes.sum()) == codes.size and bool((sizes >= 0).all())
        if state_dict["bins"] != self.bins or not fits or bool(((codes < 0) | (codes >= 2 * self.bins)).any()):
            raise CheckpointError(
                f"StatWindowedAuc(bins={self.bins}) cannot load batches of {state_dict['bins']} bins."
            )
        self.reset()
        for batch in np.split(codes.astype(np.uint32), np.cumsum(sizes)[:-1]) if sizes.size else ():
            self._append(batch)

    set_state_dict = load_state_dict


def _checked_count(stat: object, name: str, value: object, also: str = "") -> int:
    count = count_of(value)
    if count is None:
        raise ConfigError(f"{type(stat).__name__}({name}={value!r}) takes an integer of at least 1{also}.")
    return count


def _bins_or_none(stat: object, bins: object) -> int | None:
    return None if bins is None else _checked_count(stat, "bins", bins, ", or None")
