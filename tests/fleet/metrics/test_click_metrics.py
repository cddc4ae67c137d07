"""AUC, also by user and in a window, log loss and calibration, beside numpy and scikit-learn."""

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
from fleet.metrics import counted_cells
from tests.fleet.job.test_util import alone, joined
from tests.helpers.scikit_learn import calibration_curve, log_loss, roc_auc_score
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
        stat._cells.merged()
    assert stat.value(util=UTIL) == pytest.approx(gauc_of(users, scores, labels), abs=1e-12)


def test_gauc_with_bins_keeps_a_cell_for_each_part() -> None:
    users, scores, labels = samples(5000, 7)
    stat = metrics.StatGauc(bins=16)
    stat.update(users, scores, labels)
    rounded = np.minimum(np.floor(scores.astype(np.float64) * 16), 15)
    assert stat.value(util=UTIL) == pytest.approx(gauc_of(users, rounded, labels), abs=1e-12)
    assert stat._cells.merged().shape[1] <= 7 * 16


def parts_of(world_size: int) -> list[list[Any]]:
    """The batches of each worker: unlike in number, and none on the last of three."""
    users, scores, labels = samples(4000, 50)
    of_first = (0, 500, 1200, 3000 if world_size > 1 else 4000)
    bounds = [of_first, (3000, 3700, 4000), (4000,)]
    return [
        [(users[low:high], scores[low:high], labels[low:high]) for low, high in zip(own, own[1:], strict=False)]
        for own in bounds[:world_size]
    ]


def _on_workers(rank: int, world_size: int) -> dict[str, Any]:
    counted_cells._ROUND = 150  # many rounds
    util = joined(rank, world_size)
    stats: dict[str, Any] = {
        "auc": metrics.StatAuc(bins=None),
        "loss": metrics.StatLogLoss(),
        "entropy": metrics.StatNormalizedEntropy(),
        "calibration": metrics.StatCalibration(bins=10),
        "window": metrics.StatWindowedAuc(window=2, bins=100),
    }
    gauc = metrics.StatGauc()
    for user, pred, label in parts_of(world_size)[rank]:
        gauc.update(user, pred, label)
        for stat in stats.values():
            stat.update(pred, label)
    found = {name: stat.value(util=util) for name, stat in {**stats, "gauc": gauc}.items()}
    return {**found, "curve": stats["calibration"].curve(util=util)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_together_equal_scikit_learn_on_the_joined_data(world_size: int) -> None:
    users, scores, labels = samples(4000, 50)
    exact = scores.astype(np.float64)
    loss = log_loss(labels, np.clip(exact, 1e-7, 1 - 1e-7))
    rate = labels.mean()
    parts = [part for own in parts_of(world_size) for part in own[-2:]]
    last, last_labels = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
    last_bins = np.minimum(np.floor(last.astype(np.float64) * 100), 99)
    rates, means = calibration_curve(labels, exact, n_bins=10)
    for found in run_workers(_on_workers, world_size):
        assert found["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
        assert found["gauc"] == pytest.approx(gauc_of(users, scores, labels), abs=1e-12)
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
        assert found["entropy"] == pytest.approx(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))
        assert found["calibration"] == pytest.approx(exact.sum() / labels.sum())
        assert found["window"] == pytest.approx(roc_auc_score(last_labels, last_bins), abs=1e-12)
        np.testing.assert_allclose(found["curve"], (rates, means), rtol=1e-12)


def test_edges_of_the_curve_are_those_of_scikit_learn() -> None:
    scores, labels = np.array([0.0, 0.25, 0.5, 0.5, 1.0]), np.array([0, 1, 0, 1, 1])
    stat = metrics.StatCalibration(bins=4)
    stat.update(scores, labels)
    np.testing.assert_allclose(stat.curve(util=UTIL), calibration_curve(labels, scores, n_bins=4), rtol=1e-15)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 300), st.integers(0, 1000), st.integers(1, 5))
def test_exact_auc_is_that_of_scikit_learn(count: int, seed: int, batches: int) -> None:
    _, scores, labels = samples(count, 1, seed)
    labels[:2] = (0, 1)
    stat = metrics.StatAuc(bins=None)
    for part in range(batches):
        stat.update(torch.from_numpy(scores[part::batches]), labels[part::batches])
    assert stat.value(util=UTIL) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_exact_auc_tells_apart_what_no_bin_does() -> None:
    """Predictions of rare events lie in one bin of the default."""
    stat, rough = metrics.StatAuc(bins=None), metrics.StatAuc()
    for each in (stat, rough):
        each.update([1e-5, 2e-5, 3e-5, -0.0, 0.0], [0, 1, 1, 0, 0])
    assert (stat.value(util=UTIL), rough.value(util=UTIL)) == (1.0, 0.5)
    assert stat.state_dict()["cells"].shape == (3, 4)  # 0 and -0 are one prediction


def test_without_samples() -> None:
    assert metrics.StatGauc().value(util=UTIL) == 0.5
    assert metrics.StatWindowedAuc(3).value(util=UTIL) == 0.5
    assert metrics.StatAuc(bins=None).value(util=UTIL) == 0.5
    assert math.isnan(metrics.StatLogLoss().value(util=UTIL))
    assert math.isnan(metrics.StatNormalizedEntropy().value(util=UTIL))
    assert math.isnan(metrics.StatCalibration().value(util=UTIL))
    assert [len(part) for part in metrics.StatCalibration(bins=4).curve(util=UTIL)] == [0, 0]
    stat = metrics.StatGauc()
    stat.update([1, 1, 2], [0.5, 0.6, 0.7], [1, 1, 0])
    assert stat.value(util=UTIL) == 0.5
    stat.reset()
    stat.update([], [], [])
    assert stat.value(util=UTIL) == 0.5


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_alone(label: int) -> None:
    exact, loss, calibration = metrics.StatAuc(bins=None), metrics.StatLogLoss(), metrics.StatCalibration()
    for stat in (exact, loss, calibration):
        stat.update([0.25, 0.75], [label, label])
    assert exact.value(util=UTIL) == 0.5
    assert loss.value(util=UTIL) == pytest.approx(log_loss([label, label], [0.25, 0.75], labels=[0, 1]))
    assert calibration.value(util=UTIL) == pytest.approx(0.5 if label else math.nan, nan_ok=True)


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
        lambda: metrics.StatAuc(bins=None),
        metrics.StatLogLoss,
        metrics.StatNormalizedEntropy,
        metrics.StatCalibration,
        lambda: metrics.StatCalibration(bins=5),
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
    with pytest.raises(CheckpointError, match=r"StatGauc\(bins=8\) cannot load samples of StatGauc\(bins=None\)"):
        metrics.StatGauc(bins=8).load_state_dict(metrics.StatGauc().state_dict())
    with pytest.raises(CheckpointError, match=r"StatAuc\(bins=None\) cannot load counts of 4096 bins"):
        metrics.StatAuc(bins=None).load_state_dict(metrics.StatAuc().state_dict())
    with pytest.raises(CheckpointError, match=r"StatAuc\(bins=4096\) cannot load samples of StatAuc\(bins=None\)"):
        metrics.StatAuc().load_state_dict(metrics.StatAuc(bins=None).state_dict())
    with pytest.raises(CheckpointError, match=r"StatAuc\(bins=None\) cannot load samples of StatGauc\(bins=None\)"):
        metrics.StatAuc(bins=None).load_state_dict(metrics.StatGauc().state_dict())
    with pytest.raises(CheckpointError, match=r"StatGauc\(bins=None\) cannot load samples of StatAuc\(bins=None\)"):
        metrics.StatGauc().load_state_dict(metrics.StatAuc(bins=None).state_dict())
    with pytest.raises(
        CheckpointError, match=r"StatCalibration\(bins=2\) cannot load sums of StatCalibration\(bins=1\)"
    ):
        metrics.StatCalibration(bins=2).load_state_dict(metrics.StatCalibration().state_dict())
    with pytest.raises(CheckpointError, match="cannot load batches of 8 bins"):
        metrics.StatWindowedAuc(2).load_state_dict(metrics.StatWindowedAuc(2, bins=8).state_dict())
    with pytest.raises(
        CheckpointError,
        match=r"StatCalibration\(bins=1\) cannot load sums of StatCalibration\(bins=1\) and shape \(2,\)",
    ):
        metrics.StatCalibration().load_state_dict({"metric": "StatCalibration", "sums": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"StatCalibration\(bins=1\) cannot load sums of StatNormalizedEntropy"):
        metrics.StatCalibration().load_state_dict(metrics.StatNormalizedEntropy().state_dict())
    for kind in (metrics.StatLogLoss, metrics.StatNormalizedEntropy):
        with pytest.raises(CheckpointError, match=r"\(epsilon=1e-07\) cannot load sums of Stat.*\(epsilon=0.001\)"):
            kind().load_state_dict(kind(0.001).state_dict())


@pytest.mark.parametrize("kind", [metrics.StatNormalizedEntropy, metrics.StatCalibration])
def test_a_state_without_a_setting_is_one_of_the_defaults(kind: Any) -> None:
    """1.0.0rc1 wrote it so."""
    stat = kind()
    stat.update([0.5, 0.25], [1, 0])
    old = {**stat.state_dict(), "metric": kind.__name__}
    other = kind()
    other.load_state_dict(old)
    assert other.value(util=UTIL) == stat.value(util=UTIL)
    with pytest.raises(CheckpointError):
        kind(*({"StatCalibration": [2]}.get(kind.__name__, [0.01]))).load_state_dict(old)


def test_the_least_epsilon_bounds_the_log_loss() -> None:
    """Below 2**-53, 1 - epsilon is 1, and the loss of one sample would be infinite."""
    for kind in (metrics.StatLogLoss, metrics.StatNormalizedEntropy):
        stat = kind(2.0**-53)
        stat.update([1.0, 0.0, 0.5], [0, 1, 1])
        assert math.isfinite(stat.value(util=UTIL))
        for wrong in (2.0**-54, 1e-20, 0.0, 0.5, 1):
            with pytest.raises(ConfigError, match=r"takes a number from 2\*\*-53 to below 0.5"):
                kind(wrong)


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
    for kind in (metrics.StatLogLoss, metrics.StatNormalizedEntropy):
        with pytest.raises(ConfigError, match=f"{kind.__name__}.*to below 0.5"):
            kind(0.5)
    with pytest.raises(ConfigError, match=r"StatAuc\(bins=0\) takes an integer of at least 1, or None"):
        metrics.StatAuc(bins=0)
    assert type(metrics.StatAuc(bins=np.int64(8)).bins) is int
    with pytest.raises(ConfigError, match=r"StatAuc\(bins=True"):
        metrics.StatAuc(bins=True)
    with pytest.raises(ConfigError, match=r"StatCalibration\(bins=None\)"):
        metrics.StatCalibration(bins=None)  # type: ignore[arg-type]
    stat = metrics.StatGauc()
    with pytest.raises(ConfigError, match="ids are integers, got dtype <U1. Hash texts"):
        stat.update(["a"], [0.5], [1])
    with pytest.raises(ConfigError, match="2 users and 1 predictions"):
        stat.update([1, 2], [0.5], [1])
    with pytest.raises(ConfigError, match=r"StatGauc.update\(pred\): predictions are probabilities"):
        stat.update([1], [1.5], [1])
    with pytest.raises(ConfigError, match=r"StatGauc.update\(user\): takes rows of one length"):
        stat.update([[1], [1, 2]], [0.5], [1])
    others = (metrics.StatAuc(None), metrics.StatLogLoss(), metrics.StatCalibration(), metrics.StatWindowedAuc(1))
    for other in others:
        with pytest.raises(ConfigError, match="labels are 0 or 1"):
            other.update([0.5], [2])
        with pytest.raises(ConfigError, match="from 0 to 1; some are not"):
            other.update([math.nan], [1])
    assert not others[0].state_dict()["cells"].numel()
    stat.update(np.array([2**64 - 1, 2**64 - 1], np.uint64), [0.9, 0.1], [1, 0])
    assert stat.value(util=UTIL) == 1.0
