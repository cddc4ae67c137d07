"""Metrics of rankings over all workers: recall@k and nDCG@k."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet.common.whole_numbers import count_of
from fleet.errors import ConfigError
from fleet.metrics.metric_values import array_of, ids_of, numbers_of
from fleet.metrics.worker_sums import WorkerSums

if TYPE_CHECKING:
    from fleet.job.util import UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]


class _StatTopK(WorkerSums):
    """A mean over queries of what stands at the first ``k`` ranks, in 16 bytes of memory."""

    def __init__(self, k: int) -> None:
        count = count_of(k)
        if count is None:
            raise ConfigError(f"{type(self).__name__}(k={k!r}) takes an integer of at least 1.")
        super().__init__(2, f"k={count}")  # queries, their values
        self.k = count

    def update(self, scores: Any, relevance: Any) -> None:
        """Counts queries whose candidates have scores.

        Candidates of one score are ties: each has the mean relevance of them all, as in
        ``sklearn.metrics.ndcg_score``, so that a model of one score for all gets what a random order gets.

        Args:
            scores: higher is better, shape (N, candidates); infinite ones are numbers here, nan is not.
            relevance: of each candidate, shape (N, candidates): 0 or 1, for nDCG any number from 0 up.

        Raises:
            ConfigError: shapes that do not match, what is no real number, a score of nan, a relevance out of its range.
        """
        call = f"{type(self).__name__}.update"
        ranked, relevant = numbers_of(f"{call}(scores)", scores), numbers_of(f"{call}(relevance)", relevance)
        if ranked.ndim != 2 or ranked.shape != relevant.shape:
            raise ConfigError(
                f"{call}(): scores {ranked.shape} and relevance {relevant.shape} have one shape, (queries, candidates)."
            )
        if bool(np.isnan(ranked).any()):
            raise ConfigError(f"{call}(scores): some are nan.")
        self._check_relevance(f"{call}(relevance)", relevant)
        ideal = -np.sort(-relevant, axis=1)[:, : self.k]
        self._count(_expected_gains(ranked, relevant)[:, : self.k], ideal, relevant.sum(axis=1))

    def update_ids(self, ranked: Any, relevant: Any) -> None:
        """Counts queries whose answers are ids, best first, as an index of vectors returns them.

        A signed -1 is padding in both: never a hit, and not counted as relevant.

        Args:
            ranked: integer ids, shape (N, at least k); ranks after the k-th do not count. Padding fills up an answer of
                fewer.
            relevant: the relevant ids, each of relevance 1: N ids for one a query; a list of N lists of any lengths; an
                array of shape (N, most) with padding; or a tuple (ids, offsets) whose offsets, shape (N + 1), say
                where in ``ids`` each query begins and the last ends.

        Raises:
            ConfigError: shapes that do not match, ids that are no integers, fewer than k ranks, a relevant id at two
                ranks of one query.
        """
        call = f"{type(self).__name__}.update_ids"
        answers, padding = _padded_ids(f"{call}(ranked)", ranked)
        if answers.ndim != 2 or answers.shape[1] < self.k:
            raise ConfigError(f"{call}(ranked): shape {answers.shape}; k={self.k} takes (queries, at least {self.k}).")
        hits, totals = _hits(call, answers[:, : self.k], padding[:, : self.k], relevant)
        ideal = np.arange(self.k) < totals[:, None]
        self._count(hits.astype(np.float64), ideal.astype(np.float64), totals.astype(np.float64))

    def value(self, util: UtilBase | None = None) -> float:
        """Returns the mean over the queries of all workers, nan without a query; every worker must call it."""
        queries, values = self.totals(util)
        return float(values / queries) if queries else math.nan

    def _count(self, gains: Array, ideal: Array, totals: Array) -> None:
        self.sums += (len(totals), self._values(gains, ideal, totals).sum())

    @staticmethod
    def _check_relevance(call: str, relevance: Array) -> None:
        if not bool(np.all((relevance == 0) | (relevance == 1))):
            raise ConfigError(f"{call}: 0 or 1; some are not.")

    @abstractmethod
    def _values(self, gains: Array, ideal: Array, totals: Array) -> Array:
        """Returns a value for each query, 0 for one of no relevance, from the gains at its first ranks [N, k], the
        same of the best order, and its whole relevance [N]."""


class StatRecall(_StatTopK):
    """Recall@k: the relevant items at the first ``k`` ranks over all relevant items, as a mean over queries.

    With one relevant item a query, this is the hit rate, and ``sklearn.metrics.top_k_accuracy_score`` where no scores
    are equal. A query without a relevant item counts 0. Takes 16 bytes of memory.

    Args:
        k: number of ranks.

    Example:
        >>> stat = fleet.metrics.StatRecall(k=2)
        >>> stat.update(scores=[[0.9, 0.2, 0.7]], relevance=[[1, 1, 0]])
        >>> stat.update_ids(ranked=[[7, 8], [5, 6]], relevant=([7, 8, 3, 4], [0, 2, 4]))
        >>> stat.value()
        0.5
    """

    def _values(self, gains: Array, ideal: Array, totals: Array) -> Array:
        return _quotients(gains.sum(axis=1), totals)


class StatNdcg(_StatTopK):
    """nDCG@k: the discounted relevance at the first ``k`` ranks over that of the best order, as a mean over queries.

    Rank r counts 1 / log2(r + 1) of the relevance there, as in ``sklearn.metrics.ndcg_score``; for gains of 2^rel - 1,
    pass those. A query without a relevant item counts 0, as there. Takes 16 bytes of memory.

    Args:
        k: number of ranks.

    Example:
        >>> stat = fleet.metrics.StatNdcg(k=2)
        >>> stat.update(scores=[[0.9, 0.2, 0.7]], relevance=[[0, 0, 3]])
        >>> round(stat.value(), 4)
        0.6309
    """

    def _values(self, gains: Array, ideal: Array, totals: Array) -> Array:
        discounts = 1.0 / np.log2(np.arange(2, gains.shape[1] + 2))
        return _quotients(gains @ discounts, ideal @ discounts)

    @staticmethod
    def _check_relevance(call: str, relevance: Array) -> None:
        if not bool(np.all((relevance >= 0) & np.isfinite(relevance))):
            raise ConfigError(f"{call}: numbers from 0 up; some are not.")


def _quotients(parts: Array, wholes: Array) -> Array:
    return np.divide(parts, wholes, out=np.zeros(len(wholes)), where=wholes > 0)


def _expected_gains(scores: Array, relevance: Array) -> Array:
    """Returns the relevance at each rank, as a mean over the orders of equal scores."""
    if not scores.size:
        return relevance
    order = np.argsort(-scores, axis=1)
    scores, relevance = (np.take_along_axis(values, order, axis=1) for values in (scores, relevance))
    begins = np.ones(scores.shape, bool)
    begins[:, 1:] = scores[:, 1:] != scores[:, :-1]
    starts = np.flatnonzero(begins)
    sizes = np.diff(np.append(starts, scores.size))
    means = np.add.reduceat(relevance.reshape(-1), starts) / sizes
    return np.repeat(means, sizes).reshape(scores.shape)


def _hits(call: str, ranked: Array, padding: Array, relevant: Any) -> tuple[Array, Array]:
    """Returns which ranked ids are relevant, bool [N, k], and the number of relevant ids of each query [N]."""
    ids, queries = _relevant_pairs(call, len(ranked), relevant)
    numbers, places = np.unique(np.concatenate([ids, ranked.reshape(-1)]), return_inverse=True)
    rows = np.concatenate([queries, np.repeat(np.arange(len(ranked)), ranked.shape[1])])
    keys = rows * np.int64(len(numbers)) + places
    wanted = np.unique(keys[: len(ids)])
    answers = keys[len(ids) :]
    hits = np.isin(answers, wanted) & ~padding.reshape(-1)
    if len(np.unique(answers[hits])) < hits.sum():
        raise ConfigError(f"{call}(ranked): a relevant id stands at two ranks of one query.")
    totals = np.bincount(wanted // max(1, len(numbers)), minlength=len(ranked))
    return hits.reshape(ranked.shape), totals


def _relevant_pairs(call: str, count: int, relevant: Any) -> tuple[Array, Array]:
    """Returns the relevant ids, without padding, and the query of each."""
    argument = f"{call}(relevant)"
    ids, padding, offsets = _relevant_ids(argument, count, relevant)
    if ids.ndim != 1 or offsets.shape != (count + 1,) or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ConfigError(
            f"{argument}: {count} queries take {count} ids, {count} lists of ids, or a tuple of ids and {count + 1} "
            f"offsets from 0 to the number of ids; got ids {ids.shape} and offsets {offsets.shape}."
        )
    lengths = np.diff(offsets)
    if bool((lengths < 0).any()):
        raise ConfigError(f"{argument}: offsets never fall; some do.")
    return ids[~padding], np.repeat(np.arange(count), lengths)[~padding]


def _relevant_ids(argument: str, count: int, relevant: Any) -> tuple[Array, Array, Array]:
    """Returns the relevant ids, which of them are padding, and where each query begins and the last ends."""
    if isinstance(relevant, tuple):
        if len(relevant) != 2:
            raise ConfigError(f"{argument}: a tuple is (ids, offsets), got {len(relevant)} parts; lists go in a list.")
        ids, offsets = relevant
        return *_padded_ids(argument, ids), ids_of(argument, offsets)
    if isinstance(relevant, list) and any(hasattr(one, "__len__") for one in relevant):
        lists = [_padded_ids(argument, one) for one in relevant]
        if any(ids.ndim > 1 for ids, _ in lists):
            raise ConfigError(f"{argument}: takes a list of ids for each query; some are lists of lists.")
        ids, padding = (np.concatenate([np.ravel(part) for part in parts]) for parts in zip(*lists, strict=True))
        return ids, padding, np.cumsum([0, *(one.size for one, _ in lists)])
    ids, padding = _padded_ids(argument, relevant)
    if ids.ndim == 2:
        return ids.reshape(-1), padding.reshape(-1), np.arange(len(ids) + 1) * ids.shape[1]
    return ids, padding, np.arange(count + 1)


def _padded_ids(argument: str, ids: Any) -> tuple[Array, Array]:
    """Returns ids as int64, and which of them are padding: -1, but no unsigned id of the same bits."""
    array = array_of(argument, ids)
    found = ids_of(argument, array)
    return found, (found == -1) & (array.dtype.kind != "u")
