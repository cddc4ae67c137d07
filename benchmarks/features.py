"""Values a second of each transform of fleet.features, beside a plain form in Python or numpy, in turns, medians.

Run: python benchmarks/features.py [--rows 100000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np
from _table import markdown, ratios, spread

from fleet.features import Bucketize, Clip, Cross, Hash, Log, Transforms, Vocabulary

EDGES = [float(edge) for edge in range(0, 100, 10)]


def draw(rows: int) -> dict[str, Any]:
    """Returns a batch: words of a vocabulary of 10,000, integers, and numbers."""
    rng = np.random.default_rng(0)
    words = np.array([f"site-{i}.example.com" for i in range(10_000)], object)
    return {
        "word": words[rng.zipf(1.3, rows) % len(words)],
        "id": rng.integers(0, 1 << 40, rows),
        "other": rng.integers(0, 1000, rows),
        "x": rng.exponential(30, rows).astype(np.float32),
    }


def ways() -> Mapping[str, tuple[Any, Callable[[dict[str, Any]], Any]]]:
    """Returns, by name, a transform and what people write in its place."""
    places = {f"site-{i}.example.com": i for i in range(5000)}
    known = list(places)
    return {
        "Hash of text": (Hash("word"), lambda batch: [hash(word) & (2**63 - 1) for word in batch["word"]]),
        "Hash of integers": (Hash("id", num_buckets=10**6), lambda batch: batch["id"] * 2654435761 % 10**6),
        "Vocabulary": (Vocabulary("word", known), lambda batch: [places.get(word, 5000) for word in batch["word"]]),
        "Cross of integers": (
            Cross(["id", "other"], out="cross"),
            lambda batch: [hash(pair) for pair in zip(batch["id"].tolist(), batch["other"].tolist(), strict=True)],
        ),
        "Bucketize": (Bucketize("x", EDGES), lambda batch: np.digitize(batch["x"], EDGES)),
        "Clip": (Clip("x", 0, 50), lambda batch: np.clip(batch["x"], 0, 50)),
        "Log": (Log("x"), lambda batch: np.log1p(np.maximum(batch["x"], 0))),
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    batch = draw(args.rows)
    lines = []
    for name, (transform, plain) in ways().items():
        transforms = Transforms([transform])
        transforms(batch)  # compiles
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            for found, run in zip(rates, (transforms, plain), strict=True):
                began = time.perf_counter()
                run(batch)
                found.append(args.rows / (time.perf_counter() - began))
        lines.append(
            [name, f"{median(rates[0]) / 1e6:.1f} M", f"{median(rates[1]) / 1e6:.1f} M", spread(ratios(*rates), 2)]
        )
    print(markdown(["transform", "values/s", "plain", "ratio"], lines))


if __name__ == "__main__":
    main()
