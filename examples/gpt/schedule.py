"""The learning rate over a run."""

from __future__ import annotations

import math

WARMUP_SHARE = 0.1


def warmup_cosine(step: int, num_steps: int) -> float:
    """Returns the factor of the learning rate at ``step``: a linear rise over the first tenth, then a half cosine.

    It depends only on the step, so that a resumed run continues exactly where it stopped.

    Example:
        >>> [round(warmup_cosine(step, 10), 2) for step in range(0, 10, 3)]
        [0.5, 0.96, 0.5, 0.04]
    """
    warmup = max(1, round(num_steps * WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup))) / 2
