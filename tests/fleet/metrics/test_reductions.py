"""Metrics over all workers."""

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
from fleet.job.util import UtilBase
from tests.fleet.job.test_util import alone, joined
from tests.helpers.ready_python import run_python
from tests.helpers.scikit_learn import roc_auc_score
from tests.helpers.workers import run_workers

UTIL = alone()


def auc_by_walking(pos: list[int], neg: list[int]) -> float:
    """Paddle's definition, one bucket after the other from the last to the first."""
    area = seen_pos = seen_neg = 0.0
    for index in reversed(range(len(pos))):
        new_pos, new_neg = seen_pos + pos[index], seen_neg + neg[index]
        area += (new_neg - seen_neg) * (seen_pos + new_pos) / 2.0
        seen_pos, seen_neg = new_pos, new_neg
    return 0.5 if seen_pos * seen_neg == 0 else area / (seen_pos * seen_neg)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30))
def test_auc_is_the_trapezoid_area_from_the_last_bucket(buckets: list[tuple[int, int]]) -> None:
    """B.6."""
    pos, neg = [pair[0] for pair in buckets], [pair[1] for pair in buckets]
    assert metrics.auc(pos, neg, util=UTIL) == pytest.approx(auc_by_walking(pos, neg), abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_auc_equals_sklearns(data: st.DataObject) -> None:
    """B.6: exact on predictions that lie on the buckets, ties included."""
    count = data.draw(st.integers(2, 60))
    both = st.lists(st.integers(0, 1), min_size=count, max_size=count).filter(lambda x: 0 < sum(x) < len(x))
    labels = data.draw(both)
    buckets = data.draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    stat = metrics.StatAuc(bins=16)
    stat.update(np.array(buckets) / 16, labels)
    assert stat.value(util=UTIL) == pytest.approx(roc_auc_score(labels, buckets), abs=1e-12)


def test_auc_of_real_predictions_is_close_to_sklearns() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 20000)
    scores = np.clip(random.normal(0.5 + 0.1 * labels, 0.2), 0, 1)
    stat = metrics.StatAuc()
    for part in range(10):
        stat.update(scores[part::10], labels[part::10])
    assert stat.value(util=UTIL) == pytest.approx(roc_auc_score(labels, scores), abs=2e-4)


@pytest.mark.parametrize(("pos", "neg"), [([0, 0], [1, 2]), ([1, 2], [0, 0]), ([], [])])
def test_auc_without_one_of_the_classes(pos: list[int], neg: list[int]) -> None:
    """B.6: 0.5."""
    assert metrics.auc(pos, neg, util=UTIL) == 0.5


def test_ratios() -> None:
    assert metrics.acc(correct=[3, 4], total=np.array([5, 5]), util=UTIL) == 0.7
    assert metrics.mae(torch.tensor([1.5, 2.5]), 8, util=UTIL) == 0.5
    assert metrics.mse(18.0, 2, util=UTIL) == 9.0
    assert metrics.rmse(18.0, torch.tensor(2), util=UTIL) == 3.0
    assert math.isnan(metrics.acc(0, 0, util=UTIL))


def _everything(rank: int, world_size: int) -> dict[str, Any]:
    util = joined(rank, world_size)
    stat = metrics.StatAuc(bins=8)
    stat.update([0.9, 0.8, 0.2] if rank == 0 else [0.6, 0.1, 0.3], [1, 1, 0] if rank == 0 else [0, 0, 1])
    return {
        "sum": metrics.sum(np.array([[rank + 1, 2]]), util=util),
        "max": metrics.max(torch.tensor([rank, -rank]), util=util),
        "min": metrics.min(rank, util=util),
        "acc": metrics.acc(rank + 1, 4, util=util),
        "mae": metrics.mae([1.0, 2.0], 2, util=util),
        "mse": metrics.mse(8.0 * (rank + 1), rank + 1, util=util),
        "rmse": metrics.rmse(9.0 * (rank + 1), rank + 1, util=util),
        "auc": metrics.auc([0, 1 + rank], [1, rank], util=util),
        "stat": stat.value(util=util),
    }


def test_every_worker_gets_the_result_over_all() -> None:
    """B.6."""
    for got in run_workers(_everything, 2):
        assert got["sum"].tolist() == [[3, 4]]
        assert got["max"].tolist() == [1, 0]
        assert got["min"] == 0
        assert (got["acc"], got["mae"], got["mse"], got["rmse"]) == (3 / 8, 1.5, 8.0, 3.0)
        assert got["auc"] == pytest.approx(auc_by_walking([0, 3], [2, 1]))
        assert got["stat"] == pytest.approx(roc_auc_score([1, 1, 0, 0, 0, 1], [0.9, 0.8, 0.2, 0.6, 0.1, 0.3]))


def test_stat_auc_takes_two_columns_and_columns_of_one() -> None:
    stat, other = metrics.StatAuc(), metrics.StatAuc()
    stat.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[1], [0]]))
    other.update([[0.9], [0.2]], [1, 0])
    assert (stat.stat_pos == other.stat_pos).all()
    assert stat.value(util=UTIL) == 1.0
    stat.update([1.0, 0.0], [1, 0])
    assert (stat.stat_pos[-1], stat.stat_neg[0]) == (1, 1)


def test_stat_auc_state() -> None:
    stat, other = metrics.StatAuc(bins=8), metrics.StatAuc(bins=8)
    stat.update([0.9, 0.2], [1, 0])
    other.load_state_dict(stat.state_dict())
    stat.reset()
    assert stat.value(util=UTIL) == 0.5
    assert other.value(util=UTIL) == 1.0
    with pytest.raises(CheckpointError, match="bins=4"):
        metrics.StatAuc(bins=4).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("pred", "label", "message"),
    [
        ([0.5], [1, 0], "1 predictions and 2 labels"),
        ([1.5], [1], "from 0 to 1"),
        ([float("nan")], [1], "from 0 to 1"),
        ([0.5], [2], "labels are 0 or 1"),
    ],
)
def test_stat_auc_refuses_bad_batches_whole(pred: list[float], label: list[int], message: str) -> None:
    stat = metrics.StatAuc(bins=4)
    with pytest.raises(ConfigError, match=message):
        stat.update(pred, label)
    assert stat.stat_pos.sum() + stat.stat_neg.sum() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.StatAuc(bins=0), "bins=0"),
        (lambda: metrics.auc([1], [1, 2], util=UTIL), "1 buckets and stat_neg 2"),
        (lambda: metrics.auc([-1], [1], util=UTIL), "negative count"),
        (lambda: metrics.auc([0, math.nan], [1, 1], util=UTIL), "not finite"),
        (lambda: metrics.auc([0, 1], [math.inf, 1], util=UTIL), "not finite"),
        (lambda: metrics.rmse(-8, 2, util=UTIL), "is -4; squares are never negative"),
        (lambda: metrics.auc(["a"], ["b"], util=UTIL), "stat_pos"),
        (lambda: metrics.acc("x", 1, util=UTIL), "correct is 'x'"),
        (lambda: metrics.sum(1, scope=object(), util=UTIL), "scope"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_without_util_the_running_fleet_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import fleet

    monkeypatch.setitem(vars(fleet), "util", UTIL)
    assert metrics.acc(1, 2) == 0.5
    assert isinstance(UTIL, UtilBase)


def test_the_module_is_importable_alone() -> None:
    code = "import fleet.metrics, sys; sys.exit('fleet.facade' in sys.modules)"
    assert run_python(code).returncode == 0


def test_values_of_a_bfloat16_model_are_taken() -> None:
    """B.6: numpy has no bfloat16; the functions take such tensors all the same."""
    util = alone()
    assert metrics.mse(torch.tensor(8.0, dtype=torch.bfloat16), 4, util=util) == 2.0
    stat = metrics.StatAuc(16)
    stat.update(torch.tensor([0.75, 0.25], dtype=torch.bfloat16), torch.tensor([1.0, 0.0], dtype=torch.bfloat16))
    assert stat.value(util) == 1.0
