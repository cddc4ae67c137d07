"""AUC by user, normalized entropy, calibration and windowed AUC, beside numpy and scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from fleet import metrics
from fleet.errors import CheckpointError, ConfigError
from fleet.metrics import click_metrics
from tests.fleet.job.test_util import alone, joined
from tests.helpers.workers import run_workers

UTIL = alone()


def gauc_of(users: Any, scores: Any, labels: Any) -> float:
    """The definition, user by user, with scikit-learn's AUC."""
    total = weight = 0.0
    for user in np.unique(users):
        own = users == user
        if 0 < labels[own].sum() < own.sum():
            total += own.sum() * roc_auc_score(labels[own], scores[own])
            weight += own.sum()
    return total / weight if weight else 0.5


def samples(count: int, num_users: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Users, predictions with ties, labels."""
    random = np.random.default_rng(seed)
    users = random.integers(-(2**63), 2**63 - 1, num_users)[random.integers(0, num_users, count)]
    labels = random.integers(0, 2, count)
    scores = np.clip(random.normal(0.45 + 0.1 * labels, 0.2), 0, 1).astype(np.float32).round(2)
    return users, scores, labels


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 1000), st.integers(1, 5))
def test_gauc_is_the_mean_over_users(count: int, num_users: int, seed: int, batches: int) -> None:
    users, scores, labels = samples(count, num_users, seed)
    stat = metrics.StatGauc()
    for part in range(batches):
        stat.update(users[part::batches], torch.from_numpy(scores[part::batches]), labels[part::batches])
        stat._compact()
    assert stat.value(util=UTIL) == pytest.approx(gauc_of(users, scores, labels), abs=1e-12)


def test_gauc_with_bins_keeps_a_cell_for_each_part() -> None:
    users, scores, labels = samples(5000, 7)
    stat = metrics.StatGauc(bins=16)
    stat.update(users, scores, labels)
    rounded = np.minimum(np.floor(scores.astype(np.float64) * 16), 15)
    assert stat.value(util=UTIL) == pytest.approx(gauc_of(users, rounded, labels), abs=1e-12)
    assert stat._cells.shape[1] <= 7 * 16


def _on_workers(rank: int, world_size: int) -> dict[str, float]:
    click_metrics._ROUND = 300  # several rounds
    util = joined(rank, world_size)
    users, scores, labels = (part[rank::world_size] for part in samples(4000, 50))
    if rank == 1:
        users, scores, labels = users[:1500], scores[:1500], labels[:1500]
    gauc, entropy, calibration = metrics.StatGauc(), metrics.StatNormalizedEntropy(), metrics.StatCalibration()
    window, empty = metrics.StatWindowedAuc(window=2, bins=100), metrics.StatGauc()
    gauc.update(users, scores, labels)
    for begin in range(0, 1500, 500):
        for stat in (entropy, calibration, window):
            stat.update(scores[begin : begin + 500], labels[begin : begin + 500])
    if rank == 1:
        empty.update(users, scores, labels)
    found = {"gauc": gauc, "entropy": entropy, "calibration": calibration, "window": window, "one": empty}
    return {name: stat.value(util=util) for name, stat in found.items()}


def test_users_whose_samples_are_on_two_workers() -> None:
    users, scores, labels = samples(4000, 50)
    keep = np.concatenate([np.arange(0, 4000, 2), np.arange(1, 4000, 2)[:1500]])
    first = np.concatenate([np.arange(0, 4000, 2)[:1500], np.arange(1, 4000, 2)[:1500]])
    last = np.concatenate([np.arange(0, 4000, 2)[500:1500], np.arange(1, 4000, 2)[500:1500]])
    second = np.arange(1, 4000, 2)[:1500]
    rate = labels[first].mean()
    loss = log_loss(labels[first], np.clip(scores[first].astype(np.float64), 1e-7, 1 - 1e-7))
    for found in run_workers(_on_workers, 2):
        assert found["gauc"] == pytest.approx(gauc_of(users[keep], scores[keep], labels[keep]), abs=1e-12)
        assert found["one"] == pytest.approx(gauc_of(users[second], scores[second], labels[second]), abs=1e-12)
        assert found["entropy"] == pytest.approx(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))
        assert found["calibration"] == pytest.approx(scores[first].astype(np.float64).sum() / labels[first].sum())
        bins = np.minimum((scores[last].astype(np.float64) * 100).astype(int), 99)
        assert found["window"] == pytest.approx(roc_auc_score(labels[last], bins), abs=1e-12)


def test_without_samples() -> None:
    assert metrics.StatGauc().value(util=UTIL) == 0.5
    assert metrics.StatWindowedAuc(3).value(util=UTIL) == 0.5
    assert math.isnan(metrics.StatNormalizedEntropy().value(util=UTIL))
    assert math.isnan(metrics.StatCalibration().value(util=UTIL))
    stat = metrics.StatGauc()
    stat.update([1, 1, 2], [0.5, 0.6, 0.7], [1, 1, 0])
    assert stat.value(util=UTIL) == 0.5
    stat.reset()
    stat.update([], [], [])
    assert stat.value(util=UTIL) == 0.5


def test_the_window_follows() -> None:
    stat, last = metrics.StatWindowedAuc(window=3), metrics.StatAuc()
    for step in range(8):
        _, scores, labels = samples(200, 1, step)
        stat.update(scores, labels)
        if step >= 5:
            last.update(scores, labels)
    assert stat.value(util=UTIL) == last.value(util=UTIL)
    assert sum(map(len, stat._batches)) == 600


@pytest.mark.parametrize(
    "make",
    [
        metrics.StatGauc,
        lambda: metrics.StatGauc(bins=8),
        metrics.StatNormalizedEntropy,
        metrics.StatCalibration,
        lambda: metrics.StatWindowedAuc(2),
    ],
)
def test_a_state_goes_on(make: Any) -> None:
    one, other = make(), make()
    users, scores, labels = samples(300, 5)

    def update(stat: Any, part: int) -> None:
        rows = slice(100 * part, 100 * part + 100)
        given = (users[rows],) if isinstance(stat, metrics.StatGauc) else ()
        stat.update(*given, scores[rows], labels[rows])

    other.load_state_dict(other.state_dict())  # of nothing
    update(one, 0)
    update(one, 1)
    update(other, 2)
    other.load_state_dict(one.state_dict())
    assert other.value(util=UTIL) == one.value(util=UTIL)
    update(one, 2)
    update(other, 2)
    assert other.value(util=UTIL) == one.value(util=UTIL)
    one.reset()
    assert one.value(util=UTIL) == pytest.approx(make().value(util=UTIL), nan_ok=True)


def test_states_of_other_settings_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"StatGauc\(bins=8\) cannot load samples of bins=None"):
        metrics.StatGauc(bins=8).load_state_dict(metrics.StatGauc().state_dict())
    with pytest.raises(CheckpointError, match="cannot load batches of 8 bins"):
        metrics.StatWindowedAuc(2).load_state_dict(metrics.StatWindowedAuc(2, bins=8).state_dict())
    with pytest.raises(CheckpointError, match=r"StatCalibration cannot load sums of StatCalibration and shape \(2,\)"):
        metrics.StatCalibration().load_state_dict({"metric": "StatCalibration", "sums": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="StatCalibration cannot load sums of StatNormalizedEntropy"):
        metrics.StatCalibration().load_state_dict(metrics.StatNormalizedEntropy().state_dict())


@pytest.mark.parametrize("make", [metrics.StatGauc, metrics.StatCalibration, lambda: metrics.StatWindowedAuc(2)])
def test_states_of_something_else_are_refused(make: Any) -> None:
    with pytest.raises(CheckpointError, match=r"loads its own state_dict\(\), got the keys \['stat_neg', 'stat_pos'\]"):
        make().load_state_dict(metrics.StatAuc().state_dict())


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="bins=0.*integer of at least 1, or None"):
        metrics.StatGauc(bins=0)
    with pytest.raises(ConfigError, match="window=0"):
        metrics.StatWindowedAuc(0)
    with pytest.raises(ConfigError, match="bins=1073741825"):
        metrics.StatWindowedAuc(1, bins=(1 << 30) + 1)
    with pytest.raises(ConfigError, match="above 0 and below 0.5"):
        metrics.StatNormalizedEntropy(0.5)
    stat = metrics.StatGauc()
    with pytest.raises(ConfigError, match="ids are integers, got dtype <U1. Hash texts"):
        stat.update(["a"], [0.5], [1])
    with pytest.raises(ConfigError, match="2 users and 1 predictions"):
        stat.update([1, 2], [0.5], [1])
    with pytest.raises(ConfigError, match=r"StatGauc.update\(pred\): predictions are probabilities"):
        stat.update([1], [1.5], [1])
    for other in (metrics.StatNormalizedEntropy(), metrics.StatCalibration(), metrics.StatWindowedAuc(1)):
        with pytest.raises(ConfigError, match="labels are 0 or 1"):
            other.update([0.5], [2])
    stat.update(np.array([2**64 - 1, 2**64 - 1], np.uint64), [0.9, 0.1], [1, 0])
    assert stat.value(util=UTIL) == 1.0
