"""Seeds that follow from numbers: the same on every machine, and unrelated for other numbers."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import torch

from fleet.common.derived_seeds import derived_seed, seed_generators


def drawn() -> tuple[float, float, float]:
    """Returns a number of each generator."""
    return float(torch.rand(())), float(np.random.rand()), random.random()


def test_a_seed_stays_the_same_for_ever() -> None:
    """A checkpoint of an earlier version goes on with its numbers."""
    assert derived_seed(5, "turn", 0, 3) == 5498931080773921739
    assert 0 <= derived_seed(-1) < 2**63


def test_other_parts_give_other_seeds() -> None:
    parts = [(*place, kind) for place in product(range(3), range(20), range(20)) for kind in ("turn", "data")]
    assert len({derived_seed(*each) for each in parts}) == len(parts)
    assert derived_seed(1, 12) != derived_seed(11, 2) != derived_seed(112)


def test_all_generators_begin_anew() -> None:
    seed_generators(7)
    first = drawn()
    assert drawn() != first
    seed_generators(7)
    assert drawn() == first
    seed_generators(2**63 - 1)
    assert all(one != other for one, other in zip(drawn(), first, strict=True))
