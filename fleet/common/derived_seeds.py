"""Seeds that follow from other numbers, and the generators that they start: torch's, numpy's, Python's."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derived_seed(*parts: int | str) -> int:
    """Returns a seed of 63 bits that follows from ``parts`` alone; other parts give an unrelated one.

    Example:
        >>> derived_seed(0, 1, "data") == derived_seed(0, 1, "data") != derived_seed(0, 2, "data")
        True
    """
    text = " ".join(f"{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Starts the global generators of torch (on every device), numpy and Python from ``seed``."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # torch.manual_seed would keep the stack of each call for devices that may come, which takes long.
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
