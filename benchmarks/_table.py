"""Medians, paired ratios and Markdown tables for the benchmark scripts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Returns ours / theirs, pair by pair."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Returns ``median (min-max)``."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
