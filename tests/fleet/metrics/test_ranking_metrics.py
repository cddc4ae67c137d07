"""Recall@k and nDCG@k, beside scikit-learn and beside sets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet import metrics
from fleet.errors import CheckpointError, ConfigError
from tests.fleet.job.test_util import alone, joined
from tests.helpers.scikit_learn import ndcg_score, top_k_accuracy_score
from tests.helpers.workers import run_workers

UTIL = alone()
KINDS = (metrics.StatRecall, metrics.StatNdcg)


def queries(count: int, candidates: int, seed: int = 0, ties: int = 5) -> tuple[Any, Any]:
    """Scores, of which many are equal, and relevance from 0 to 3; the first query has no relevant candidate."""
    random = np.random.default_rng(seed)
    relevance = random.integers(0, 4, (count, candidates)) * (random.random((count, candidates)) < 0.3)
    relevance[0] = 0
    return random.integers(0, ties, (count, candidates)) / ties, relevance


def recall_by_orders(scores: Any, relevant: Any, k: int) -> float:
    """The mean of the definition over random orders of equal scores."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(4000):
        order = np.lexsort((random.random(len(scores)), -scores))
        found.append(relevant[order[:k]].sum() / relevant.sum())
    return float(np.mean(found))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(2, 30), st.integers(1, 40), st.integers(0, 1000))
def test_ndcg_is_that_of_scikit_learn(count: int, candidates: int, k: int, seed: int) -> None:
    """Ties, queries without a relevant candidate and k beyond the candidates included."""
    scores, relevance = queries(count, candidates, seed)
    stat = metrics.StatNdcg(k)
    stat.update(torch.from_numpy(scores[::2]), torch.from_numpy(relevance[::2]))
    stat.update(scores[1::2], relevance[1::2])
    assert stat.value(util=UTIL) == pytest.approx(ndcg_score(relevance, scores, k=k), abs=1e-12)


def test_recall_of_ties_is_the_mean_over_their_orders() -> None:
    scores, relevance = queries(4, 12, seed=3)
    for row in range(1, 4):
        relevant = (relevance[row] > 0).astype(int)
        stat = metrics.StatRecall(k=4)
        stat.update(scores[[row]], relevant[None])
        assert stat.value(util=UTIL) == pytest.approx(recall_by_orders(scores[row], relevant, 4), abs=0.02)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_recall_of_one_relevant_item_is_the_top_k_accuracy(k: int) -> None:
    random = np.random.default_rng(1)
    scores, labels = random.random((200, 10)), random.integers(0, 10, 200)
    labels[:10] = np.arange(10)
    by_scores, by_ids = metrics.StatRecall(k), metrics.StatRecall(k)
    by_scores.update(scores, np.eye(10)[labels])
    by_ids.update_ids(np.argsort(-scores, axis=1), labels)
    expected = top_k_accuracy_score(labels, scores, k=k) if k < 10 else 1.0
    assert by_scores.value(util=UTIL) == pytest.approx(expected)
    assert by_ids.value(util=UTIL) == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.integers(1, 8), st.integers(0, 1000))
def test_ids_are_looked_up_in_the_set_of_their_query(count: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    items = random.integers(-(2**63), 2**63 - 1, 30)
    ranked = np.stack([random.permutation(items)[: k + 2] for _ in range(count)])
    sets = [random.choice(items, random.integers(0, 12), replace=False) for _ in range(count)]
    ids = np.concatenate([*sets, np.zeros(0, np.int64)])
    offsets = np.cumsum([0, *map(len, sets)])
    recall, ndcg = metrics.StatRecall(k), metrics.StatNdcg(k)
    recall.update_ids(ranked, (np.repeat(ids, 2), 2 * offsets))  # an id that is named twice is one
    ndcg.update_ids(torch.from_numpy(ranked), (torch.from_numpy(ids), torch.from_numpy(offsets)))
    expected = [len({*row[:k]} & {*own}) / len(own) if len(own) else 0.0 for row, own in zip(ranked, sets, strict=True)]
    assert recall.value(util=UTIL) == pytest.approx(np.mean(expected), abs=1e-12)
    # The same as a matrix over all items: those that were not ranked have no score above the others.
    scores = np.array([[k + 2 - list(row).index(item) if item in row else 0 for item in items] for row in ranked])
    relevance = np.array([[int(item in own) for item in items] for own in sets])
    assert ndcg.value(util=UTIL) == pytest.approx(ndcg_score(relevance, scores, k=k), abs=1e-12)


def test_an_index_that_fills_up_and_unsigned_ids() -> None:
    stat = metrics.StatRecall(k=3)
    stat.update_ids([[5, -1, -1], [6, 7, -1]], ([5, 9, 7], [0, 2, 3]))
    assert stat.value(util=UTIL) == 0.75
    other = metrics.StatRecall(k=1)
    other.update_ids(np.array([[2**64 - 1]], np.uint64), np.array([2**64 - 1], np.uint64))
    assert other.value(util=UTIL) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_neither_a_hit_nor_relevant(kind: Any) -> None:
    stat = kind(2)
    stat.update_ids([[7, -1]], ([-1], [0, 1]))
    stat.update_ids(torch.tensor([[7, -1]]), torch.tensor([-1]))
    stat.update_ids([[7, -1]], np.array([2**64 - 1], np.uint64))  # an id, whose bits are those of -1
    assert stat.sums.tolist() == [3.0, 0.0]
    padded, without = kind(2), kind(2)
    padded.update_ids([[7, 8, -1], [5, -1, -1]], np.array([[7, 9, -1], [5, -1, -1]]))
    without.update_ids([[7, 8, 0], [5, 0, 0]], ([7, 9, 5], [0, 2, 3]))
    assert padded.value(util=UTIL) == without.value(util=UTIL) > 0


@pytest.mark.parametrize(
    "relevant",
    [
        [[7, 9], [6], []],
        [torch.tensor([7, 9]), np.array([6]), np.zeros(0)],
        [[7, 9, -1], [6], [-1]],
        [[7, 9], [6, -1], [-1, -1]],
        torch.tensor([[7, 9], [6, -1], [-1, -1]]),
    ],
)
def test_relevant_ids_as_a_list_for_each_query(relevant: Any) -> None:
    stat = metrics.StatRecall(k=2)
    stat.update_ids([[7, 8, 9], [5, 6, 7], [1, 2, 3]], relevant)
    assert stat.value(util=UTIL) == 0.5


def test_a_model_of_one_score_gets_what_chance_gets() -> None:
    relevance = np.zeros((1, 100))
    relevance[0, 0] = 1
    stat = metrics.StatRecall(k=10)
    stat.update(np.ones((1, 100)), relevance)
    assert stat.value(util=UTIL) == pytest.approx(0.1)
    stat.reset()
    stat.update(np.where(np.arange(100) < 50, -math.inf, 0.5)[None], relevance)  # candidates left out
    assert stat.value(util=UTIL) == 0.0


def _on_workers(rank: int, world_size: int) -> dict[str, float]:
    util = joined(rank, world_size)
    scores, relevance = queries(300, 20)
    recall, ndcg = metrics.StatRecall(5), metrics.StatNdcg(5)
    if rank < 2:  # a third worker has no query
        own = slice(rank, None, min(world_size, 2))
        ndcg.update(scores[own], relevance[own])
        recall.update(scores[own], relevance[own] > 0)
    return {"recall": recall.value(util=util), "ndcg": ndcg.value(util=util)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_together_equal_one_process(world_size: int) -> None:
    scores, relevance = queries(300, 20)
    recall = metrics.StatRecall(5)
    recall.update(scores, relevance > 0)
    for found in run_workers(_on_workers, world_size):
        assert found["ndcg"] == pytest.approx(ndcg_score(relevance, scores, k=5), abs=1e-12)
        assert found["recall"] == pytest.approx(recall.value(util=UTIL), abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on(kind: Any) -> None:
    one, other = kind(3), kind(3)
    assert math.isnan(one.value(util=UTIL))
    one.update(np.zeros((0, 4)), np.zeros((0, 4)))
    one.update_ids(np.zeros((0, 3), np.int64), [])
    assert math.isnan(one.value(util=UTIL))
    one.update([[0.5, 0.1, 0.3, 0.2]], [[1, 1, 0, 0]])
    other.load_state_dict(one.state_dict())
    assert other.value(util=UTIL) == one.value(util=UTIL) > 0
    with pytest.raises(CheckpointError, match=rf"{kind.__name__}\(k=4\) cannot load sums of {kind.__name__}\(k=3\)"):
        kind(4).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (lambda stat: stat.update([0.5], [1]), r"scores \(1,\) and relevance \(1,\) have one shape"),
        (lambda stat: stat.update([[0.5, 0.1]], [[1]]), r"\(1, 2\) and relevance \(1, 1\)"),
        (lambda stat: stat.update([[math.nan, 0.1]], [[1, 0]]), r"scores\): some are nan"),
        (lambda stat: stat.update([[0.5, 0.1]], [[-1, 0]]), r"update\(relevance\): "),
        (lambda stat: stat.update([[0.5, 0.1]], [[math.nan, 0]]), r"update\(relevance\): "),
        (lambda stat: stat.update_ids([[1]], [1]), r"shape \(1, 1\); k=2 takes \(queries, at least 2\)"),
        (lambda stat: stat.update_ids([[0.5, 1.0]], [1]), "ids are integers, got dtype float64"),
        (lambda stat: stat.update_ids([[1, 2]], ["a"]), r"update_ids\(relevant\): ids are integers"),
        (lambda stat: stat.update_ids([[1, 2]], [1, 2]), "1 queries take 1 ids, 1 lists of ids, or a tuple of ids and"),
        (lambda stat: stat.update_ids([[1, 2]], [[1], [2]]), "1 queries take 1 ids, 1 lists of ids"),
        (lambda stat: stat.update_ids([[1, 2]], [[[1], [2]]]), "some are lists of lists"),
        (lambda stat: stat.update_ids([[1, 2]], [[[1], [2, 3]]]), r"update_ids\(relevant\): takes rows of one length"),
        (lambda stat: stat.update_ids([[1, 2]], ([1],)), r"a tuple is \(ids, offsets\), got 1 parts"),
        (lambda stat: stat.update_ids([[1, 2], [1]], [1, 1]), r"update_ids\(ranked\): takes rows of one length"),
        (lambda stat: stat.update([[0.5, 0.1], [0.2]], [[1, 0], [1]]), r"update\(scores\): takes rows of one length"),
        (lambda stat: stat.update([[0.5j, 0.1]], [[1, 0]]), r"update\(scores\): takes real numbers, got dtype complex"),
        (lambda stat: stat.update_ids([[1, 2]], ([1, 2], [0, 1])), "from 0 to the number of ids"),
        (lambda stat: stat.update_ids([[1, 2], [1, 2]], ([1], [0, 2, 1])), "offsets never fall"),
        (lambda stat: stat.update_ids([[1, 1]], [1]), "a relevant id stands at two ranks of one query"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_refusals_change_nothing(kind: Any, update: Any, message: str) -> None:
    stat = kind(2)
    with pytest.raises(ConfigError, match=message):
        update(stat)
    assert not stat.sums.any()


def test_settings_are_refused() -> None:
    for kind in KINDS:
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\(k=0\) takes an integer of at least 1"):
            kind(0)
        assert type(kind(np.int64(3)).k) is int
    with pytest.raises(ConfigError, match="0 or 1; some are not"):
        metrics.StatRecall(1).update([[0.5]], [[2]])
