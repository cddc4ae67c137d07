"""Samples counted exactly, and the AUC and GAUC of those of all workers, exchanged in rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleet.common.host_array import host_array
from fleet.errors import CheckpointError
from fleet.metrics.metric_values import check_state, reduced

if TYPE_CHECKING:
    from fleet.job.util import UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]

_ROUND = 1 << 20  # cells, of all workers together, that are exchanged at a time
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads neighbouring ids over the rounds


class CountedCells:
    """Counts positives and negatives of each key that occurs, in memory that grows with the number of keys.

    A cell is a column of int64: its key, the place of a prediction or a user and such a place, then its positives and
    its negatives.

    Args:
        num_keys: 1 for keys that are places, 2 for keys that are users and places.
    """

    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys
        self.clear()

    def clear(self) -> None:
        """Forgets all samples."""
        self._cells: Array = np.zeros((self.num_keys + 2, 0), np.int64)
        self._new: list[Array] = []
        self._num_new = 0

    def add(self, *rows: Array) -> None:
        """Counts samples: ``num_keys`` arrays of int64 [N], then whether each sample is positive, bool [N]."""
        self._new.append(np.stack([*rows, ~rows[-1]]).astype(np.int64))
        self._num_new += len(rows[-1])
        # Merged when the new samples outnumber the cells, so that merging costs no more than the samples did.
        if self._num_new > max(1 << 16, self._cells.shape[1]):
            self.merged()

    def merged(self) -> Array:
        """Returns the cells in the order of their keys, each key once."""
        if self._new:
            self._cells = _merged([self._cells, *self._new])
            self._new = []
            self._num_new = 0
        return self._cells

    def state(self, stat: object, bins: int | None) -> dict[str, Any]:
        """Returns a state of the cells of ``stat`` as tensors, with the number of bins that made the places."""
        return {"metric": type(stat).__name__, "bins": bins, "cells": torch.from_numpy(self.merged().copy())}

    def load(self, stat: object, state: Mapping[str, Any], bins: int | None) -> None:
        """Loads a state of the metric ``stat``; raises CheckpointError for one of other bins or another metric."""
        check_state(stat, state, "metric", "bins", "cells")
        cells = np.array(host_array(state["cells"]), np.int64)
        name = type(stat).__name__
        writer = state["metric"]
        if writer != name or state["bins"] != bins or cells.ndim != 2 or len(cells) != self.num_keys + 2:
            raise CheckpointError(
                f"{name}(bins={bins}) cannot load samples of {writer}(bins={state['bins']}), of shape {cells.shape}."
            )
        self.clear()
        self._cells = cells


def auc_of(cells: Array, util: UtilBase) -> float:
    """Returns the AUC of the cells of all workers, whose keys are places; 0.5 without one of the classes.

    Places are exchanged from the lowest up, in ranges that hold at most two rounds of cells: each worker names every
    ``step``-th of its places, and a range ends at every ``replicas``-th of all those named.
    """
    replicas = int(reduced(util, 1))
    step = max(1, _ROUND // replicas)
    named = np.sort(np.concatenate(_gatherer(util)(np.ascontiguousarray(cells[0, step - 1 :: step]))))
    ends = np.unique(named[replicas - 1 :: replicas])
    wins = num_pos = num_neg = 0.0
    for part in np.split(cells, np.searchsorted(cells[0], ends, side="right"), axis=1):
        _, pos, neg = _of_workers(part, util)
        # A positive wins against each negative with a lower prediction, and half against each tie.
        wins += float(np.dot(pos, num_neg + np.cumsum(neg) - neg / 2.0))
        num_pos += float(pos.sum())
        num_neg += float(neg.sum())
    return wins / (num_pos * num_neg) if num_pos and num_neg else 0.5


def gauc_of(cells: Array, util: UtilBase) -> float:
    """Returns the mean AUC of users by impressions, over the cells of all workers; 0.5 where no user has both classes.

    All cells of a user are exchanged in one round.
    """
    rounds = max(1, -(-int(reduced(util, cells.shape[1])) // _ROUND))
    homes = (cells[0].view(np.uint64) * _MIX >> np.uint64(32)).astype(np.int64) % rounds
    total = weight = 0.0
    for number in range(rounds):
        area, impressions = _areas(_of_workers(cells[:, homes == number], util))
        total += area
        weight += impressions
    return total / weight if weight else 0.5


def _gatherer(util: UtilBase) -> Callable[[Any], list[Any]]:
    return getattr(util, "gather_replicas", None) or util.all_gather  # a user's util may have the second only


def _of_workers(cells: Array, util: UtilBase) -> Array:
    """Returns the cells of all workers as one."""
    # Flat, because an array of no columns has no place for its shape on the wire.
    found = _gatherer(util)(np.ascontiguousarray(cells).reshape(-1))
    return _merged([np.asarray(one, np.int64).reshape(len(cells), -1) for one in found])


def _merged(parts: list[Array]) -> Array:
    """Returns cells in the order of their keys, each key once."""
    cells = np.concatenate(parts, axis=1)
    if cells.shape[1] == 0:
        return cells
    cells = cells[:, np.lexsort(cells[-3::-1])]
    starts = np.flatnonzero(np.append(True, (np.diff(cells[:-2]) != 0).any(axis=0)))
    return np.concatenate([cells[:-2, starts], np.add.reduceat(cells[-2:], starts, axis=1)])


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
