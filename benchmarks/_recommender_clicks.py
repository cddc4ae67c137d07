"""Clicks whose true probabilities are known, how well scores order them, and the memory of a process.

Imports numpy only, because each peer of ``recommenders.py`` has an environment of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

EXPONENT = 1.2
# An id's part of the truth: a weight, and factors whose products with those of the other fields count. Ids whose ranks
# differ by a multiple of EFFECTS have the same part.
EFFECTS, FACTORS, WEIGHT_STD, FACTOR_STD, BIAS = 4096, 4, 0.3, 0.2, -1.5
HELD_OUT, HELD_OUT_SEED = 40_000, 10**6


def draw_ranks(rng: np.random.Generator, num_tables: int, num_ids: int, count: int) -> np.ndarray:
    """Returns ranks (tables, count) that follow Zipf's law; 0 is the most popular id."""
    edges = np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -EXPONENT)
    return np.searchsorted(edges / edges[-1], rng.random((num_tables, count)))


def spread_ids(ranks: np.ndarray, num_ids: int) -> np.ndarray:
    """Returns the ids of ranks: popular ones lie anywhere in a table."""
    return ranks * 7919 % num_ids


def truth(ranks: np.ndarray) -> np.ndarray:
    """Returns the probabilities (samples,) of clicks on ids of these ranks (tables, samples)."""
    rng = np.random.default_rng(0)
    logits = np.full(ranks.shape[1], BIAS)
    total = np.zeros((ranks.shape[1], FACTORS))
    for of_table in ranks % EFFECTS:
        logits += rng.normal(0.0, WEIGHT_STD, EFFECTS)[of_table]
        factors = rng.normal(0.0, FACTOR_STD, (EFFECTS, FACTORS))[of_table]
        logits += (total * factors).sum(1)
        total += factors
    return 1 / (1 + np.exp(-logits))


def clicks(num_tables: int, num_ids: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids (tables, count) by Zipf's law, clicks on them, and their true probabilities; by the seed alone."""
    rng = np.random.default_rng(seed)
    ranks = draw_ranks(rng, num_tables, num_ids, count)
    probabilities = truth(ranks)
    clicked = (rng.random(count) < probabilities).astype(np.float32)
    return spread_ids(ranks, num_ids), clicked, probabilities


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of pairs of a click and none that the scores put in order; ties count half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    clicked = labels > 0
    num_clicks = clicked.sum()
    above = ranks[clicked].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * (len(labels) - num_clicks)))


def held_out(num_tables: int, num_ids: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what :func:`clicks` does, of samples that no worker trains on."""
    return clicks(num_tables, num_ids, HELD_OUT, HELD_OUT_SEED)


def resident_bytes(process: str = "self") -> float:
    """Returns the resident memory of a process; a page that n processes share counts 1/n."""
    rollup = Path("/proc", process, "smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)
    return 1024.0 * int(found[1]) if found else 0.0
