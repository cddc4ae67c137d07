"""Metrics of click models over all workers: AUC (whole, by user, in a window), normalized entropy, calibration."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleet.errors import CheckpointError, ConfigError
from fleet.metrics.metric_values import area_under, checked_batch, host_array, reduced, util_of
from fleet.metrics.reductions import auc

if TYPE_CHECKING:
    from fleet.job.util import UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]

_ROUND = 1 << 20  # cells, of all workers together, that are exchanged at a time
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads neighbouring ids over the rounds
_CELL_ROWS = 4  # user, prediction, positives, negatives


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
        # A prediction of exactly 1 belongs to the last bucket.
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
        # Copies: from_numpy() shares memory, and later batches would change a state that is being saved.
        return {"stat_pos": torch.from_numpy(self.stat_pos.copy()), "stat_neg": torch.from_numpy(self.stat_neg.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads counts; raises CheckpointError when they were made with a different number of bins."""
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
        if bins is not None and (type(bins) is not int or bins < 1):
            raise ConfigError(f"StatGauc(bins={bins!r}) takes an integer of at least 1, or None.")
        self.bins = bins
        self.reset()

    def reset(self) -> None:
        """Forgets all samples."""
        self._cells: Array = np.zeros((_CELL_ROWS, 0), np.int64)
        self._new: list[Array] = []
        self._num_new = 0

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
        users = np.asarray(host_array(user)).reshape(-1)
        if users.dtype.kind not in "iu" and users.size:
            raise ConfigError(f"StatGauc.update(user): ids are integers, got dtype {users.dtype}. Hash texts before.")
        if users.size != scores.size:
            raise ConfigError(f"StatGauc.update(): {users.size} users and {scores.size} predictions.")
        if self.bins is not None:
            places = np.minimum((scores * self.bins).astype(np.int64), self.bins - 1)
        else:
            # The bits of numbers from 0 up are in the order of the numbers; adding 0 turns -0 into 0.
            places = (scores.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
        ids = users.astype(np.uint64).view(np.int64) if users.dtype.kind == "u" else users.astype(np.int64)
        self._new.append(np.stack([ids, places, labels == 1, labels == 0]).astype(np.int64))
        self._num_new += len(ids)
        # Merged when the new samples outnumber the cells, so that merging costs no more than the samples did.
        if self._num_new > max(1 << 16, self._cells.shape[1]):
            self._compact()

    def _compact(self) -> Array:
        """Returns the cells: of each pair of a user and a prediction, in order, the positives and negatives."""
        if self._new:
            self._cells = _merged([self._cells, *self._new])
            self._new = []
            self._num_new = 0
        return self._cells

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the GAUC of everything counted so far on all workers, 0.5 where no user has both classes.

        Every worker must call it.
        """
        chosen = util_of(util)
        cells = self._compact()
        gather = getattr(chosen, "gather_replicas", None) or chosen.all_gather
        rounds = max(1, -(-int(reduced(chosen, cells.shape[1])) // _ROUND))
        # All cells of a user come together in one round, from all workers.
        homes = (cells[0].view(np.uint64) * _MIX >> np.uint64(32)).astype(np.int64) % rounds
        total = weight = 0.0
        for number in range(rounds):
            # Flat, because an array of no columns has no place for its shape on the wire.
            found = gather(np.ascontiguousarray(cells[:, homes == number]).reshape(-1))
            area, impressions = _areas(_merged([np.asarray(one, np.int64).reshape(_CELL_ROWS, -1) for one in found]))
            total += area
            weight += impressions
        return total / weight if weight else 0.5

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's samples as tensors, for ``fleet.save`` and ``fleet.checkpoint``."""
        return {"bins": self.bins, "cells": torch.from_numpy(self._compact().copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads samples; raises CheckpointError when they were made with a different number of bins."""
        _check_state(self, state_dict, "bins", "cells")
        cells = np.array(host_array(state_dict["cells"]), np.int64)
        if state_dict["bins"] != self.bins or cells.ndim != 2 or len(cells) != _CELL_ROWS:
            raise CheckpointError(
                f"StatGauc(bins={self.bins}) cannot load samples of bins={state_dict['bins']} and shape {cells.shape}."
            )
        self.reset()
        self._cells = cells

    set_state_dict = load_state_dict


def _check_state(stat: object, state: Mapping[str, Any], *names: str) -> None:
    if not set(names) <= set(state):
        raise CheckpointError(f"{type(stat).__name__} loads its own state_dict(), got the keys {sorted(state)}.")


def _merged(parts: list[Array]) -> Array:
    """Returns cells ordered by user and prediction, each pair once."""
    cells = np.concatenate(parts, axis=1)
    order = np.lexsort((cells[1], cells[0]))
    cells = cells[:, order]
    if cells.shape[1] == 0:
        return cells
    starts = np.flatnonzero(np.append(True, (np.diff(cells[:2]) != 0).any(axis=0)))
    return np.concatenate([cells[:2, starts], np.add.reduceat(cells[2:], starts, axis=1)])


def _areas(cells: Array) -> tuple[float, float]:
    """Returns the sum over users with both classes of AUC times impressions, and their impressions."""
    if cells.shape[1] == 0:
        return 0.0, 0.0
    users, _, pos, neg = cells
    starts = np.flatnonzero(np.append(True, np.diff(users) != 0))
    lengths = np.diff(np.append(starts, len(users)))
    below = np.cumsum(neg) - neg
    below = below - np.repeat(below[starts], lengths)
    # A positive wins against each negative of its user with a lower prediction, and half against each tie.
    wins = np.add.reduceat(pos * (below + neg / 2.0), starts)
    num_pos = np.add.reduceat(pos, starts)
    num_neg = np.add.reduceat(neg, starts)
    both = (num_pos > 0) & (num_neg > 0)
    impressions = (num_pos + num_neg)[both]
    areas = wins[both] / (num_pos[both].astype(np.float64) * num_neg[both])
    return float(np.dot(areas, impressions)), float(impressions.sum())


class _Sums:
    """Three sums of a worker: samples, positives, and a value of the subclass."""

    def __init__(self) -> None:
        self.sums: Array = np.zeros(3, np.float64)

    def reset(self) -> None:
        """Resets all sums."""
        self.sums[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's sums and the metric's name, for ``fleet.save`` and ``fleet.checkpoint``."""
        return {"metric": type(self).__name__, "sums": torch.from_numpy(self.sums.copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads sums; raises CheckpointError for the sums of another metric."""
        _check_state(self, state_dict, "metric", "sums")
        sums = np.array(host_array(state_dict["sums"]), np.float64)
        own = type(self).__name__
        if state_dict["metric"] != own or sums.shape != (3,):
            raise CheckpointError(f"{own} cannot load sums of {state_dict['metric']} and shape {sums.shape}.")
        self.sums = sums

    set_state_dict = load_state_dict

    def _add(self, labels: Array, value: float) -> None:
        self.sums += (labels.size, float((labels == 1).sum()), value)

    def _over_workers(self, util: UtilBase | None) -> tuple[float, float, float]:
        count, positive, value = np.asarray(reduced(util_of(util), self.sums))
        return float(count), float(positive), float(value)


class StatNormalizedEntropy(_Sums):
    """The mean log loss over the entropy of the average click rate: below 1 is better than predicting the average.

    Args:
        epsilon: least distance of predictions from 0 and 1, where the log loss has no bound.

    Example:
        >>> stat = fleet.metrics.StatNormalizedEntropy()
        >>> stat.update([0.5, 0.5], [1, 0])
        >>> stat.value()
        1.0
    """

    def __init__(self, epsilon: float = 1e-7) -> None:
        if not isinstance(epsilon, float) or not 0.0 < epsilon < 0.5:
            raise ConfigError(f"StatNormalizedEntropy(epsilon={epsilon!r}) takes a number above 0 and below 0.5.")
        super().__init__()
        self.epsilon = epsilon

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch, as :meth:`fleet.metrics.StatAuc.update` takes it."""
        scores, labels = checked_batch("StatNormalizedEntropy.update", pred, label)
        kept = np.clip(scores, self.epsilon, 1.0 - self.epsilon)
        self._add(labels, float(-np.log(np.where(labels == 1, kept, 1.0 - kept)).sum()))

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the quotient over all workers, nan without a positive or a negative; every worker must call it."""
        count, positive, loss = self._over_workers(util)
        rate = positive / count if count else 0.0
        if not 0.0 < rate < 1.0:
            return math.nan
        return loss / count / -(rate * math.log(rate) + (1.0 - rate) * math.log(1.0 - rate))


class StatCalibration(_Sums):
    """The sum of the predictions over the number of positives: 1 is calibrated, above 1 predicts too much.

    Example:
        >>> stat = fleet.metrics.StatCalibration()
        >>> stat.update([0.75, 0.75], [1, 0])
        >>> stat.value()
        1.5
    """

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch, as :meth:`fleet.metrics.StatAuc.update` takes it."""
        scores, labels = checked_batch("StatCalibration.update", pred, label)
        self._add(labels, float(scores.sum()))

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the quotient over all workers, nan without a positive; every worker must call it."""
        _, positive, predicted = self._over_workers(util)
        return predicted / positive if positive else math.nan


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
        for name, number in (("window", window), ("bins", bins)):
            if type(number) is not int or number < 1:
                raise ConfigError(f"StatWindowedAuc({name}={number!r}) takes an integer of at least 1.")
        if bins > 1 << 30:
            raise ConfigError(f"StatWindowedAuc(bins={bins!r}): at most {1 << 30}.")
        self.window = window
        self.bins = bins
        self.reset()

    def reset(self) -> None:
        """Forgets all batches."""
        self._batches: deque[Array] = deque()  # of each sample twice its part of [0, 1], and 1 more for a positive
        self._counts: Array = np.zeros(2 * self.bins, np.int64)

    def update(self, pred: Any, label: Any) -> None:
        """Counts one batch, as :meth:`fleet.metrics.StatAuc.update` takes it; the oldest leaves a full window."""
        scores, labels = checked_batch("StatWindowedAuc.update", pred, label)
        places = np.minimum((scores * self.bins).astype(np.int64), self.bins - 1)
        self._append((2 * places + (labels == 1)).astype(np.uint32))

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
        _check_state(self, state_dict, "bins", "sizes", "codes")
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
