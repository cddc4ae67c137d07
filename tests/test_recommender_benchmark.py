"""The benchmarks of recommenders and of networks: what they compute is right, and they run at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import nn

from tests.examples.scripts import environment
from tests.helpers.namespaces import missing
from tests.helpers.sources import ROOT
from tests.test_gpu_benchmark import module


def test_auc_counts_ordered_pairs_and_halves_of_ties() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 5, 40).astype(float), (rng.random(40) < 0.3).astype(np.float32)
    pairs = list(product(scores[labels == 1], scores[labels == 0]))
    expected = np.mean([(clicked > other) + 0.5 * (clicked == other) for clicked, other in pairs])
    assert module("_recommender_clicks").auc(scores, labels) == pytest.approx(expected)


def test_clicks_follow_from_the_seed_and_have_the_probabilities_that_are_given() -> None:
    clicks = module("_recommender_clicks").clicks
    ids, clicked, probabilities = clicks(26, 1000, 20_000, 3)
    for first, again in zip((ids, clicked, probabilities), clicks(26, 1000, 20_000, 3), strict=True):
        assert np.array_equal(first, again)
    assert not np.array_equal(clicks(26, 1000, 20_000, 4)[0], ids)
    likely = probabilities > np.median(probabilities)
    for part in (likely, ~likely):
        assert clicked[part].mean() == pytest.approx(probabilities[part].mean(), abs=0.015)


def test_the_truth_is_of_weights_and_of_all_pairs_of_factors() -> None:
    drawn = module("_recommender_clicks")
    ranks = np.array([[3], [5], [4096 + 3]])
    rng = np.random.default_rng(0)
    logit, factors = drawn.BIAS, []
    for rank in (3, 5, 3):
        logit += rng.normal(0.0, drawn.WEIGHT_STD, drawn.EFFECTS)[rank]
        factors.append(rng.normal(0.0, drawn.FACTOR_STD, (drawn.EFFECTS, drawn.FACTORS))[rank])
    logit += sum(float(one @ other) for one, other in combinations(factors, 2))
    assert drawn.truth(ranks) == pytest.approx([1 / (1 + np.exp(-logit))])


def test_deepfm_adds_weights_pairs_of_factors_and_a_network() -> None:
    models = module("_recommender_model")
    rows = torch.randn(2, 3 * 12)
    model = models.DeepFM(nn.Identity(), 3)
    fields = rows.view(2, 3, 12)
    pairs = sum((fields[:, i, 1:] * fields[:, j, 1:]).sum(1) for i, j in combinations(range(3), 2))
    expected = fields[..., 0].sum(1) + pairs + model.deep(rows).squeeze(1)
    torch.testing.assert_close(model(rows), expected)


def test_a_pause_begins_at_the_last_step_before_the_kill() -> None:
    longest_pause = module("_recommender_kills").longest_pause
    assert longest_pause([1.0, 9.0, 10.0, 14.0, 15.0], 11.0) == 4.0


def run(script: str, *flags: str) -> str:
    """Returns what a benchmark prints at a tiny size."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepfm", "towers"])
def test_recommenders_train_beside_each_other(model: str) -> None:
    printed = run("recommenders.py", "--only", "training", "--models", model, "--samples", "10000")
    for system in ("plain torch, DDP", "sync, fleet.SparseEmbeddings", "async, fleet.SparseEmbeddings"):
        row = next(line for line in printed.splitlines() if line.startswith(f"| {system} |"))
        assert 0.5 < float(row.split("|")[-3].split()[0]) < 0.89, row


@pytest.mark.slow
def test_kills_lose_no_update_on_servers() -> None:
    rows = [line.split("|") for line in run("recommenders.py", "--only", "kills").splitlines() if "| fleet, " in line]
    assert len(rows) == 4
    assert {row[-2].strip() for row in rows} == {"0"}, rows


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_job_runs_on_nodes_and_gets_a_server_meanwhile() -> None:
    printed = run("network.py", "--wires", "float32", "int8")
    sent = [
        float(
            next(line for line in printed.splitlines() if f"| sync, two nodes, {wire}," in line)
            .split("|")[-3]
            .split(",")[0]
        )
        for wire in ("float32", "int8")
    ]
    assert sent[1] < 0.6 * sent[0]  # most of it are dense parameters, which int8 sends as bfloat16
    assert "3 of 3 server processes serve" in printed
